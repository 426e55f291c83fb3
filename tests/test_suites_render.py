"""Token ids of a prompt: one BOS, the template where it belongs, and no silent surprise."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.errors import UsageError
from spectune.suites import Message, Prompt, render

BOS = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TEMPLATE
REFUSING = "{{ raise_exception('System role not supported') }}"
VOCAB = ["<unk>", "<s>", "</s>", "<system>", "<user>", "<assistant>", "hello", "there", "a", "be", "kind"]


def make_tokenizer(*, adds_bos: bool, template: str | None = None, has_bos: bool = True, adds_eos: bool = False) -> Any:
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if adds_eos else "<s> $A", special_tokens=[("<s>", BOS), ("</s>", BOS + 1)]
        )
    special = {"bos_token": "<s>"} if has_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", chat_template=template, **special)


def ids(*words: str) -> list[int]:
    return [VOCAB.index(word) for word in words]


CHAT = Prompt("c", "x", messages=(Message("system", "be kind"), Message("user", "hello there")))
RAW = Prompt("r", "x", text="hello there")
CHAT_IDS = ids("<system>", "be", "kind", "<user>", "hello", "there", "<assistant>")


@pytest.mark.parametrize(
    ("adds_bos", "template", "has_bos", "expected"),
    [
        (True, WITH_BOS, True, [BOS, *CHAT_IDS]),
        (True, TEMPLATE, True, [BOS, *CHAT_IDS]),
        (False, WITH_BOS, True, [BOS, *CHAT_IDS]),
        (False, TEMPLATE, True, CHAT_IDS),
        (False, TEMPLATE, False, CHAT_IDS),
    ],
    ids=["both print it", "only the tokenizer", "only the template", "neither", "no BOS token at all"],
)
def test_chat_starts_with_exactly_one_bos_if_anybody_adds_it(
    adds_bos: bool, template: str, has_bos: bool, expected: list[int]
) -> None:
    assert render(CHAT, make_tokenizer(adds_bos=adds_bos, template=template, has_bos=has_bos)) == expected


def test_chat_does_not_end_with_an_end_token_that_the_tokenizer_adds() -> None:
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True, template=TEMPLATE)
    assert render(CHAT, tokenizer) == [BOS, *CHAT_IDS]


@pytest.mark.parametrize(("adds_bos", "start"), [(True, [BOS]), (False, [])])
def test_raw_text_gets_the_normal_encoding(adds_bos: bool, start: list[int]) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos, template=WITH_BOS)
    assert render(RAW, tokenizer) == [*start, *ids("hello", "there")]


def test_raw_text_that_spells_bos_does_not_get_a_second_one() -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    assert render(Prompt("r", "x", text="<s> hello"), tokenizer) == [BOS, *ids("hello")]


def test_template_on_wraps_raw_text_as_a_user_message() -> None:
    tokenizer = make_tokenizer(adds_bos=True, template=WITH_BOS)
    expected = [BOS, *ids("<user>", "hello", "there", "<assistant>")]
    assert render(RAW, tokenizer, chat_template=True) == expected


def test_template_off_joins_messages_plainly() -> None:
    tokenizer = make_tokenizer(adds_bos=True, template=WITH_BOS)
    assert render(CHAT, tokenizer, chat_template=False) == [BOS, *ids("be", "kind", "hello", "there")]


def test_without_a_template_messages_are_joined() -> None:
    assert render(CHAT, make_tokenizer(adds_bos=False)) == ids("be", "kind", "hello", "there")


def test_asking_for_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        render(RAW, make_tokenizer(adds_bos=False), chat_template=True)


def test_a_refusing_template_names_the_prompt() -> None:
    tokenizer = make_tokenizer(adds_bos=False, template=REFUSING)
    with pytest.raises(UsageError, match="refuses prompt 'c': System role not supported"):
        render(CHAT, tokenizer)


def test_no_token_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="prompt 'r' gives no token"):
        render(Prompt("r", "x", text="  "), make_tokenizer(adds_bos=False))
