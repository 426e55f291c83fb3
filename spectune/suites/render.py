"""From a prompt to the token ids that a model gets.

The trap here is the BOS token: a chat template may print it, and the tokenizer may add it again. A prompt
with two of them is one that the model never saw in training, and its speed-up says little.
"""

from __future__ import annotations

from typing import Any

from spectune.errors import UsageError
from spectune.suites.prompt import Message, Prompt


def render(prompt: Prompt, tokenizer: Any, *, chat_template: bool | None = None) -> list[int]:
    """The ids of a prompt, for a Hugging Face tokenizer.

    `chat_template=None` uses the tokenizer's template for `messages` where there is one, and takes a `text`
    as it is. True wraps a `text` as one user message. False joins the contents of `messages` by blank lines,
    without any roles. The ids start with exactly one BOS if the tokenizer adds one or the template prints it.

    Raises UsageError if a template is asked for and the tokenizer has none, if the template refuses the
    messages, and if no token comes out.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat_template and not has_template:
        raise UsageError("this tokenizer has no chat template", "turn the chat template off")
    if chat_template or (chat_template is None and has_template and prompt.messages is not None):
        messages = prompt.messages or (Message("user", prompt.text or ""),)
        ids = _encode(tokenizer, _apply_template(tokenizer, messages, prompt.id), special=False)
        starts_with_bos = _adds_bos(tokenizer)
    else:
        ids = _encode(tokenizer, _plain_text(prompt), special=True)
        starts_with_bos = False
    ids = _one_bos(ids, tokenizer.bos_token_id, add=starts_with_bos)
    if not ids:
        raise UsageError(f"prompt {prompt.id!r} gives no token")
    return ids


def _plain_text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(message.content for message in prompt.messages)


def _apply_template(tokenizer: Any, messages: tuple[Message, ...], prompt_id: str) -> str:
    from jinja2 import TemplateError

    said = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError) as error:
        raise UsageError(
            f"the chat template refuses prompt {prompt_id!r}: {error}",
            "leave the prompt out, or turn the chat template off",
        ) from error


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and _encode(tokenizer, "a", special=True)[:1] == [bos]


def _one_bos(ids: list[int], bos: int | None, *, add: bool) -> list[int]:
    start = 0
    while bos is not None and start < len(ids) and ids[start] == bos:
        start += 1
    return ([bos] if bos is not None and (start or add) else []) + ids[start:]
