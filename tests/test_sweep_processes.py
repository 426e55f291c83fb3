"""Sweeps in processes of their own: kills, interrupts, two at once, the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spectune.sweeping.rundir import RunDirectory

HERE = Path(__file__).parent
SCRIPT = """
import sys
import time
from fake_engine import FakeEngine
from spectune.cli import app as cli
from spectune.sweeping import session

pause, cells = float(sys.argv.pop(1)), int(sys.argv.pop(1))


class Engine(FakeEngine):
    def run_pass(self, spec, requests, **how):
        if len({key for _, key in self.log} | {spec.key}) > cells:
            time.sleep(60)
        return super().run_pass(spec, requests, **how)


session.load_engine = lambda options: Engine(pass_seconds=pause)
session.fingerprint = lambda device: {"device": device}
cli.main()
"""
pytestmark = pytest.mark.skipif(os.name != "posix", reason="uses POSIX signals")


@pytest.fixture
def arguments(tmp_path):
    suite = tmp_path / "mine.jsonl"
    suite.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"prompt {n}"}) + "\n" for n in range(3)))
    return ["--suite", str(suite), "--k", "1-8", "--peak-bandwidth", "100", "-o", str(tmp_path / "r")]


def start(arguments: list[str], *, pause: float = 0.0, cells: int = 1000) -> subprocess.Popen[str]:
    """A sweep whose passes take `pause` seconds, and which is stuck once it has measured so many cells."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(pause), str(cells), "sweep", *arguments],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))},
        # Tests that run in the background of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for_cell(process: subprocess.Popen[str], number: int = 1) -> None:
    """Until the process has told that many finished cells."""
    for line in process.stderr:
        if line.startswith(f"[{number}/"):
            return
    pytest.fail("the sweep ended early")


def essence(path: Path) -> dict[str, object]:
    cells = {}
    for result in RunDirectory(path).results():
        cell = result.model_dump(exclude={"started_at", "finished_at", "warmup_seconds"})
        for done in cell["passes"]:
            del done["wall_seconds"]
        cells[result.key] = cell
    return cells


def test_a_sweep_killed_at_any_moment_resumes_to_the_same_cells(tmp_path, arguments):
    rng = random.Random(7)
    for _ in range(10):
        process = start([*arguments, "--resume"], pause=0.03)
        # From the moment the run directory is opened, so that kills fall on locks, passes and writes alike.
        for line in process.stderr:
            if "cells, " in line:
                break
        time.sleep(rng.uniform(0, 0.08))
        process.kill()
        finish(process)
        for path in (tmp_path / "r").rglob("*.json"):
            json.loads(path.read_text())
    code, _, err = finish(start([*arguments, "--resume"]))
    assert code == 0, err
    code, _, err = finish(start([*arguments[:-1], str(tmp_path / "whole")]))
    assert code == 0, err
    assert len(essence(tmp_path / "r")) == 8
    assert essence(tmp_path / "r") == essence(tmp_path / "whole")
    assert not list((tmp_path / "r").rglob("*.tmp"))


def test_two_processes_measure_each_cell_once(tmp_path, arguments):
    processes = [start([*arguments, "--resume"], pause=0.1) for _ in range(2)]
    told = []
    for process in processes:
        code, _, err = finish(process)
        assert code == 0, err
        told.append([line for line in err.splitlines() if line.startswith("[")])
    assert len(told[0]) + len(told[1]) == 8
    assert len(essence(tmp_path / "r")) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_finished_cells_and_prints_how_to_go_on(tmp_path, arguments, number):
    process = start(arguments, cells=2)
    wait_for_cell(process, 2)
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 130
    assert out == ""
    assert "Traceback" not in err
    command = next(line for line in err.splitlines() if "--resume" in line).split("try: ")[1]
    assert len(essence(tmp_path / "r")) == 2
    words = command.split()
    assert words[:2] == ["spectune", "sweep"]
    code, out, err = finish(start(words[2:]))
    assert code == 0, err
    assert len(essence(tmp_path / "r")) == 8
    assert f"next: spectune recommend {tmp_path / 'r'}" in out


def test_json_is_all_there_is_on_stdout(tmp_path, arguments):
    code, out, err = finish(start([*arguments, "--json"]))
    assert code == 0
    summary = json.loads(out)
    assert (summary["cells"], summary["finished"], summary["failed"]) == (8, 8, [])
    assert summary["run"] == str(tmp_path / "r")
    assert all(result["speedup"] > 0 for result in summary["results"])
    assert "theory  peak bandwidth 100.0 GB/s" in err
    assert "[8/8] mine, batch 1, ngram, K 8: " in err


def test_quiet_says_nothing_but_the_results(arguments):
    code, out, err = finish(start([*arguments, "--quiet"]))
    assert (code, err) == (0, "")
    assert "speedup" in out


def test_a_second_run_in_the_same_folder_says_how_to_resume(arguments):
    assert finish(start(arguments))[0] == 0
    code, out, err = finish(start(arguments))
    assert (code, out) == (2, "")
    assert "holds a run already" in err
    assert "--resume" in err
    assert "Traceback" not in err


def test_a_config_file_and_a_dry_run(tmp_path, arguments):
    config = tmp_path / "c.toml"
    config.write_text(f'[sweep]\nsuite = "{arguments[1]}"\nk = "1-3"\ndry-run = true\npeak-bandwidth = 50\n')
    code, out, err = finish(start(["--config", str(config), "--k", "5", "-o", str(tmp_path / "d")]))
    assert code == 0, err
    assert "cells   1" in out
    assert "50.0 GB/s" in out
    assert not (tmp_path / "d").exists()


def test_starting_needs_no_torch():
    code = (
        "import sys, spectune.sweeping.session, spectune.cli.app, spectune.sweeping.summary\n"
        "sys.exit(len({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=False).returncode == 0


def test_help_names_every_option_and_its_default():
    from spectune.sweeping.options import SweepOptions, flag, option_names

    env = {**os.environ, "COLUMNS": "300", "TERMINAL_WIDTH": "300", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "spectune", "sweep", "--help"],
        cwd=HERE.parent,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Example: spectune sweep" in done.stdout
    for name in option_names():
        assert flag(name) in done.stdout
    defaults = SweepOptions()
    for shown in (
        defaults.target,
        defaults.drafts[0],
        ", ".join(defaults.suites),
        ",".join(map(str, defaults.ks)),
        str(defaults.max_new_tokens),
    ):
        assert f"default: {shown}" in done.stdout
