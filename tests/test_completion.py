"""Shell completion: typer's scripts, and our names behind them, without a model library."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from synthetic_run import cell, write_run

from spectune.cli import completion

PROGRAM = (
    "import sys\n"
    "sys.argv[:] = ['spectune', *sys.argv[1:]]\n"
    "from spectune.cli import main\n"
    "try:\n    main()\n"
    "finally:\n"
    "    print(sorted({'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules)), file=sys.stderr)\n"
)


def shell(*words: str, cwd=None, **environment: str) -> str:
    """What the program prints to a shell; it must not have loaded a model library."""
    # Typer asks for the shell's name where it does not look for it among the parent processes.
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True, env=environment, cwd=cwd
    )
    assert done.stderr.splitlines()[-1] == "[]"
    return done.stdout


def test_show_completion_prints_a_script_for_the_shell():
    assert "complete -o default -F _spectune_completion spectune" in shell("--show-completion", "bash")


def test_bash_is_offered_suites_where_a_suite_is_wanted():
    line = "spectune sweep --suite c"
    offered = shell(_SPECTUNE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD="3").split()
    assert offered == ["chat", "code", "creative"]


def test_runs_are_offered_by_their_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first", [cell()])
    write_run(tmp_path / "other", [cell()])
    (tmp_path / "runs" / "empty").mkdir()
    assert completion.runs("") == ["other", "runs/first"]
    assert completion.runs("ru") == completion.runs("runs/f") == ["runs/first"]
    assert completion.runs("[") == []


@pytest.mark.parametrize(
    ("begun", "offered"), [("n", ["ngram"]), ("eagle", ["eagle:", "eagle3:", "eagle2:"]), ("org/model", [])]
)
def test_drafters_are_offered_by_kind(begun, offered):
    assert completion.drafters(begun) == offered


def test_engines_are_those_of_recommend(spectune, tmp_path):
    run = write_run(tmp_path / "run", [cell()])
    assert completion.engines("v") == ["vllm"]
    assert [spectune("recommend", run, "--for", engine)[0] for engine in completion.engines("")] == [0] * 5
