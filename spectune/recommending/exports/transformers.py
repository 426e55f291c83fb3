"""transformers 5.24: Python around `model.generate`.

Names: `generation/configuration_utils.py` of transformers 5.24.0.
"""

from __future__ import annotations

import json

from spectune.recommending.exports.export import Export, Variant, Wanted, allowed, lacking
from spectune.recommending.exports.names import head_path, ngram_lengths

VERSION = "transformers 5.24"
OFF = "model.generate(**inputs)"
ARGUMENTS = frozenset(
    {
        "assistant_model",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    }
)


def export(wanted: Wanted) -> Export:
    """Lines of Python; one K, as assisted generation takes batch 1 only."""
    text = _python(wanted)
    if text is None:
        return lacking("transformers", VERSION, wanted)
    return Export(
        "transformers",
        VERSION,
        text,
        ("Assisted generation takes batch 1 only.",),
        schedule=Variant(None, ("Assisted generation takes batch 1 only.",)) if wanted.schedule else None,
        synthetic=Variant(None, ("transformers cannot force acceptance.",)) if wanted.acceptance else None,
        warnings=(
            "With sliding-window layers masks and keys were seen to disagree (transformers#48280): compare the "
            "output with plain decoding.",
        ),
    )


def _python(wanted: Wanted) -> str | None:
    drafter, k = wanted.choice.drafter, str(wanted.choice.k)
    if wanted.tree:
        return None
    # The defaults change K as they go and stop drafting early; these do neither.
    fixed = {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": '"constant"',
        "assistant_confidence_threshold": "0.0",
    }
    if wanted.method == "draft-model":
        name = json.dumps(head_path(drafter), ensure_ascii=False)
        return (
            f"assistant = AutoModelForCausalLM.from_pretrained({name})\n"
            f"assistant.generation_config.update({_arguments(fixed)})\n"
            f"model.generate(**inputs, {_arguments({'assistant_model': 'assistant'})})"
        )
    if wanted.method == "ngram":
        lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": str(ngram_lengths(drafter)[1])}
        return f"model.generate(**inputs, {_arguments(lookup)})"
    layer = head_path(drafter)
    if wanted.method == "early-exit" and layer.isdecimal():
        return (
            f"model.generation_config.update({_arguments(fixed)})\n"
            f"model.generate(**inputs, {_arguments({'assistant_early_exit': layer})})"
        )
    return None


def _arguments(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in allowed(values, ARGUMENTS).items())
