"""The recipes for CI and the page about the gate: every command exists, and the gate's own ones run as written."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
import yaml
from gate_helpers import timed_cell
from synthetic_run import write_run

from spectune.cli.app import app
from spectune.gating.metric import METRICS
from spectune.gating.policy import read_policy
from spectune.sweeping.config import settings

ROOT = Path(__file__).parent.parent
GITHUB = yaml.safe_load((ROOT / "docs" / "ci" / "github.yml").read_text())
GITLAB = yaml.safe_load((ROOT / "docs" / "ci" / "gitlab.yml").read_text())
PAGE = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")


def recipe_lines() -> list[str]:
    steps = [step for job in GITHUB["jobs"].values() for step in job["steps"]]
    github = [line for step in steps for line in step.get("run", "").splitlines()]
    return github + [line for job in GITLAB.values() for line in job["script"]]


def page_lines() -> list[str]:
    """Commands of the page's console blocks, continued lines joined."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [line.removeprefix("$ ") for b in blocks for line in b.replace("\\\n", " ").splitlines() if line.strip()]


def commands(program: str) -> list[list[str]]:
    words = [shlex.split(line) for line in [*recipe_lines(), *page_lines()]]
    return [w for w in words if w and w[0] == program]


def test_both_recipes_hold_an_exact_job_for_any_cpu_and_a_timed_one_for_an_own_gpu():
    exact, timed = GITHUB["jobs"]["exact"], GITHUB["jobs"]["timed"]
    assert exact["runs-on"] == "ubuntu-latest"
    assert "self-hosted" in timed["runs-on"]
    assert GITLAB["gate-timed"]["tags"] == ["gpu"]
    for line in recipe_lines():
        assert line.split()[0] in ("pip", "spectune")
    for job in GITLAB.values():
        assert job["artifacts"]["when"] == "always"
        assert set(job["artifacts"]["reports"]) == {"junit", "metrics"}


@pytest.mark.parametrize("words", commands("spectune"), ids=lambda w: " ".join(w[:3]))
def test_every_option_of_the_recipes_and_the_page_exists(words):
    known = typer.main.get_command(app).commands[words[1]]
    options = {name for parameter in known.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {w.partition("=")[0] for w in words[2:] if re.match(r"--?[a-z]", w)}
    assert used <= options


def test_files_that_the_recipes_name_are_here():
    for name in ("workloads/gate.toml", "constraints.txt"):
        assert (ROOT / name).is_file()
        assert any(name in line for line in recipe_lines())


def test_the_sweep_of_the_gate_is_small_greedy_and_in_float32_on_a_cpu():
    options = settings({}, ROOT / "workloads" / "gate.toml").options
    assert (options.dtype, options.device, options.temperature) == ("float32", "cpu", None)
    assert len(options.drafts) * len(options.suites) * options.prompts * options.max_new_tokens <= 500
    policy = read_policy(ROOT / "workloads" / "gate.toml")
    place = ("code", "ngram", "greedy", 3, 1)
    assert all(policy.limit(m, place).stated for m in METRICS.values() if m.kind == "exact")
    # One request of a cell may change, two may not.
    assert 1 / options.prompts <= policy.limit(METRICS["outputs"], place).tolerance < 2 / options.prompts


@pytest.fixture
def checkout(tmp_path, monkeypatch, spectune):
    """A folder that holds what the commands name: runs, their baselines and thresholds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    cells = [timed_cell(2.0), timed_cell(1.8, suite="chat", suite_digest="s1")]
    for words in commands("spectune"):
        for path in (w for w in words if w.startswith("runs/")):
            if not Path(path).exists():
                write_run(Path(path), cells)
    (tmp_path / "workloads").mkdir()
    shutil.copy(ROOT / "workloads" / "gate.toml", tmp_path / "workloads")
    for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / "gate.toml").write_text(block)
    for words in commands("spectune"):
        if "--baseline" in words:
            assert spectune("baseline", words[2], "-o", words[words.index("--baseline") + 1])[0] == 0
    return tmp_path


def test_every_gate_and_baseline_command_runs_as_it_is_written(checkout, spectune):
    seen = 0
    for words in commands("spectune"):
        if words[1] in ("gate", "baseline"):
            code, out, err = spectune(*words[1:])
            assert code == 0, (words, out, err)
            seen += 1
    assert seen >= 8
    for name in ("gate.xml", "metrics.txt", "summary.md"):
        assert (checkout / name).stat().st_size > 0


def test_the_make_target_uses_the_committed_files():
    makefile = (ROOT / "Makefile").read_text()
    assert "sweep --config workloads/gate.toml" in makefile
    assert "--baseline workloads/gate-baseline.json --thresholds workloads/gate.toml --only exact" in makefile


def test_the_page_lists_every_metric_with_its_direction():
    for m in METRICS.values():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{m.name}`"))
        assert f"| {m.kind} |" in row
        assert f"| {m.better} |" in row
