"""Prompts to train on: the templates of workloads/training.toml, filled from a seed.

The same seed gives the same endless stream of prompts on every machine, without repetition, so a corpus can be
longer or shorter and still begin alike.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from random import Random
from typing import Any, Literal

from spectune.recommending.mix import parse_mix
from spectune.suites.prompt import Message, Prompt

_SLOT = re.compile(r"\{([a-z_]+[0-9]?)(?:#([2-9]))?(?::(\d+)-(\d+)(?::(\d+))?)?\}")
_TRIES = 60  # draws before a category counts as used up


@dataclass(frozen=True, slots=True)
class Template:
    """`chat` is said by a user, `raw` is continued as it stands, `stub` is a function to be completed."""

    category: str
    text: str = ""
    kind: Literal["chat", "raw", "stub"] = "chat"
    weight: int = 1
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Stub:
    """A Python function to be completed, with one call of it."""

    signature: str
    purpose: str
    arguments: str
    result: str

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


@dataclass(frozen=True, slots=True)
class PromptBook:
    """Everything prompts are made of. `shares` weigh the categories."""

    shares: Mapping[str, float]
    slots: Mapping[str, Sequence[str]]
    templates: tuple[Template, ...]
    stubs: tuple[Stub, ...]

    @property
    def digest(self) -> str:
        """Hash of all that shapes the stream of prompts."""
        whole = [dict(self.shares), {k: list(v) for k, v in self.slots.items()}]
        whole += [[repr(t) for t in self.templates], [repr(s) for s in self.stubs]]
        return hashlib.sha256(json.dumps(whole, ensure_ascii=False).encode()).hexdigest()[:16]


def training_book(mix: str | None = None) -> PromptBook:
    """The prompt book that comes with the package; a `mix` such as `code=0.8,math=0.2` replaces its shares.

    Raises:
        UsageError: a mix of other categories, or no mix.
    """
    book = parse_book((files("spectune") / "workloads" / "training.toml").read_text("utf-8"))
    return book if mix is None else replace(book, shares=parse_mix(mix, book.shares, "to train on"))


def parse_book(text: str) -> PromptBook:
    """Read a prompt book in TOML. Raises ValueError for a slot that no list fills."""
    data = tomllib.loads(text)
    book = PromptBook(
        shares=data["shares"],
        slots=data.get("slots", {}),
        templates=tuple(Template(**entry) for entry in data["templates"]),
        stubs=tuple(Stub(*entry) for entry in data.get("stub", ())),
    )
    texts = [t.text for t in book.templates] + [entry for entries in book.slots.values() for entry in entries]
    for entry in texts:
        known = {name for name, _, low, _, _ in _SLOT.findall(entry) if low} | book.slots.keys()
        for name, *_ in _SLOT.findall(entry):
            if name not in known:
                raise ValueError(f"no list fills {{{name}}} in {entry!r}")
    return book


def expand(book: PromptBook, *, seed: int = 0) -> Iterator[Prompt]:
    """The stream of prompts; it ends when new draws only repeat what was there."""
    seen: set[str] = set()
    counts = dict.fromkeys(book.shares, 0)
    open_ = {name: share for name, share in book.shares.items() if share > 0}
    while open_:
        # The category furthest behind its share: any beginning of the stream has the same mixture.
        category = min(open_, key=lambda name: (counts[name] + 1) / open_[name])
        prompt = _draw(book, category, counts[category], seed, seen)
        if prompt is None:
            del open_[category]
            continue
        counts[category] += 1
        yield prompt


def _draw(book: PromptBook, category: str, number: int, seed: int, seen: set[str]) -> Prompt | None:
    """The next prompt of a category that is not in `seen`; None if tries run out."""
    templates = [t for t in book.templates if t.category == category]
    rng = Random(f"{seed}:{category}:{number}")
    for _ in range(_TRIES):
        template = _weighted(templates, rng)
        prompt = _fill(template, book, rng, f"{category}-{number:05d}")
        body = prompt.text or "\n".join(m.content for m in prompt.messages or ())
        if body not in seen:
            seen.add(body)
            return prompt
    return None


def _fill(template: Template, book: PromptBook, rng: Random, name: str) -> Prompt:
    if template.kind == "stub":
        return Prompt(name, template.category, text=_stub_text(_pick(book.stubs, rng), rng))
    words: dict[tuple[str, str], str] = {}
    text = _fill_slots(template.text, book.slots, words, rng)
    if template.kind == "raw":
        return Prompt(name, template.category, text=text)
    said = Message("user", text[:1].upper() + text[1:])
    if template.system is None:
        return Prompt(name, template.category, messages=(said,))
    system = Message("system", _fill_slots(template.system, book.slots, words, rng))
    return Prompt(name, template.category, messages=(system, said))


def _fill_slots(text: str, slots: Mapping[str, Sequence[str]], words: dict[tuple[str, str], str], rng: Random) -> str:
    """Fill the slots of a text. Words are shared with the texts nested in it, numbers are each text's own."""
    numbers: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        name, again, low, high, step = match.groups()
        if low is not None:
            if name not in numbers:
                places = (int(high) - int(low)) // int(step or 1) + 1
                numbers[name] = str(int(low) + _below(places, rng) * int(step or 1))
            return numbers[name]
        if name in numbers:
            return numbers[name]
        key = (name, again or "")
        if key not in words:
            used = {value for (other, _), value in words.items() if other == name}
            entry = _pick([e for e in slots[name] if e not in used] or slots[name], rng)
            words[key] = entry
        return _fill_slots(words[key], slots, words, rng)

    return _SLOT.sub(fill, text)


def _stub_text(stub: Stub, rng: Random) -> str:
    """The beginning of a Python file that ends where the function's body starts."""
    call = f"{stub.name}({stub.arguments})"
    example = f">>> {call}\n    {stub.result}"
    typed = f"def {stub.signature}:"
    match _below(6, rng):
        case 0:
            body = f'{_old_style(typed)}\n    """ {stub.purpose}\n    {example}\n    """\n'
            return f"from typing import Dict, List, Tuple\n\n\n{body}" if "[" in typed else f"\n\n{body}"
        case 1:
            return f'{typed}\n    """{stub.purpose}\n\n    {example}\n    """\n'
        case 2:
            lines = f"{stub.purpose}\n    For example, {call} returns {stub.result}."
            return f'{_untyped(stub.signature)}\n    """{lines}\n    """\n'
        case 3:
            return f'{typed}\n    """{stub.purpose}"""\n'
        case 4:
            return f"# {stub.purpose}\n# Example: {call} -> {stub.result}\n{_untyped(stub.signature)}\n"
        case _:
            return f"\n{_untyped(stub.signature)}\n    '''\n    {stub.purpose}\n    {call} ➞ {stub.result}\n    '''\n"


def _old_style(signature: str) -> str:
    """Type hints as they were written before Python 3.9."""
    return re.sub(r"\b(dict|list|tuple)\[", lambda m: m[1].capitalize() + "[", signature)


def _untyped(signature: str) -> str:
    """A `def` line without type hints."""
    tree = ast.parse(f"def {signature}: pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.returns = None
    extra: list[ast.arg | None] = [tree.args.vararg, tree.args.kwarg]
    for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs, *extra):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(tree).split("\n")[0]


def _weighted(templates: Sequence[Template], rng: Random) -> Template:
    left = _below(sum(t.weight for t in templates), rng)
    for template in templates:
        left -= template.weight
        if left < 0:
            return template
    raise AssertionError("weights are positive")


# Only Random.random() is promised to give the same numbers in every version of Python.
def _below(count: int, rng: Random) -> int:
    return int(rng.random() * count)


def _pick(items: Sequence[Any], rng: Random) -> Any:
    return items[_below(len(items), rng)]
