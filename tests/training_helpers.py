"""A tiny target that can be trained for: calm enough to be learnt from, with a tokenizer of characters."""

from __future__ import annotations

from pathlib import Path

from heads_helpers import load_calm


def save_target(folder: Path) -> Path:
    """A tiny model with a tokenizer: one token per ASCII character, everything else is unknown."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    load_calm(folder)
    names = {chr(i): i for i in range(3, 128)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
