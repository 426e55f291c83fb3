"""The run directory: nothing half-written, nothing mixed, nothing measured twice."""

from __future__ import annotations

import errno
import json
import os

import pytest
from fake_engine import model
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import SpectuneError, UsageError
from spectune.sweeping.cell import CellSpec, FailedCell, RunInfo, Sampling
from spectune.sweeping.opening import default_path, environment_differences, open_run, plan_differences
from spectune.sweeping.rundir import RunDirectory


def spec(**changes) -> CellSpec:
    plain = {
        "target": "t",
        "target_digest": "d",
        "drafter": "ngram",
        "drafter_digest": "none",
        "suite": "code",
        "suite_digest": "s",
        "k": 4,
        "batch": 1,
        "rule": "greedy",
        "max_new_tokens": 64,
        "chat_template": True,
        "dtype": "float32",
        "device": "cpu",
        "draft_device": "cpu",
    }
    return CellSpec(**(plain | changes))


def info(*plan: CellSpec, **environment) -> RunInfo:
    return RunInfo(
        name="r",
        created_at="2026-01-01T00:00:00+00:00",
        spectune_version="0",
        command=("spectune", "sweep"),
        environment=environment,
        target=model("t"),
        drafters={s.drafter: None for s in plan},
        plan=plan,
    )


def failed(cell: CellSpec, message: str = "no memory") -> FailedCell:
    return FailedCell(key=cell.key, spec=cell, failed_at="now", reason="oom", message=message)


def opened(directory: RunDirectory, run: RunInfo, *, resume: bool = False, allow: bool = False):
    return open_run(directory, run, resume=resume, again="AGAIN", allow_env_mismatch=allow)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "runs" / "r")


def names(directory: RunDirectory) -> set[str]:
    return {p.name for p in directory.path.rglob("*") if p.is_file() and p.suffix != ".lock"}


specs = st.builds(
    spec,
    target=st.text(max_size=8),
    k=st.integers(1, 64),
    sampling=st.builds(Sampling, temperature=st.floats(0, 2), top_p=st.floats(0.1, 1)),
    seed=st.integers(-(2**40), 2**40),
)


@given(specs, st.text(max_size=20))
def test_what_is_written_is_read_back(tmp_path_factory, cell, message):
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    opened(directory, info(cell))
    with directory.claim(cell.key) as ours:
        assert ours
        directory.write_failure(failed(cell, message))
    assert directory.info() == info(cell)
    assert directory.failures() == (failed(cell, message),)
    assert directory.failure(cell.key) == failed(cell, message)


def test_a_run_is_not_started_twice_but_resumed(directory):
    opened(directory, info(spec()))
    with pytest.raises(UsageError, match="holds a run already") as caught:
        opened(directory, info(spec()))
    assert caught.value.hint == "AGAIN"
    assert opened(directory, info(spec()), resume=True) == ()


def test_a_folder_with_other_files_is_left_alone(directory):
    directory.path.mkdir(parents=True)
    (directory.path / "thesis.tex").write_text("")
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"not empty \(it holds thesis.tex\)"):
            opened(directory, info(spec()), resume=resume)
    assert names(directory) == {"thesis.tex"}


def test_a_start_that_was_killed_before_its_plan_was_written_does_not_block_the_folder(directory):
    with directory.locked():
        (directory.path / "run.json.tmp").write_text("{")
    opened(directory, info(spec()))
    assert names(directory) == {"run.json"}


def test_resuming_adds_new_cells_and_keeps_the_old(directory):
    opened(directory, info(spec(k=2), spec(k=4)))
    opened(directory, info(spec(k=4), spec(k=8)), resume=True)
    assert [s.k for s in directory.info().plan] == [2, 4, 8]
    small = spec(drafter="small", drafter_digest="x")
    opened(directory, info(small).model_copy(update={"drafters": {"small": model("small")}}), resume=True)
    assert directory.info().plan[-1] == small
    assert set(directory.info().drafters) == {"ngram", "small"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_digest": "e"}, "target_digest is d there and e here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"max_new_tokens": 8}, "max_new_tokens is 64 there"),
        ({"repeats": 3}, "repeats"),
        ({"sampling": Sampling(temperature=1), "rule": "speculative"}, "sampling is temperature 0"),
        ({"suite_digest": "z"}, "suite code has other prompts"),
        ({"drafter_digest": "z"}, "draft ngram has other weights"),
        ({"draft_device": "cuda:0"}, "draft ngram is on another device"),
    ],
)
def test_a_run_of_other_settings_is_refused_and_says_which(directory, changes, said):
    opened(directory, info(spec()))
    with pytest.raises(UsageError, match=said):
        opened(directory, info(spec(**changes)), resume=True)
    assert directory.info() == info(spec())


def test_axes_may_differ_within_a_run():
    others = (
        spec(k=8),
        spec(batch=8),
        spec(suite="math", suite_digest="m"),
        spec(drafter="x", drafter_digest="y"),
    )
    assert plan_differences((spec(),), others) == []


def test_another_environment_is_refused_unless_allowed(directory):
    opened(directory, info(spec(), torch="2.0", cpu="A"))
    there = info(spec(k=8), torch="2.1", cpu="A")
    with pytest.raises(UsageError, match=r"torch was 2\.0, is 2\.1"):
        opened(directory, there, resume=True)
    assert opened(directory, there, resume=True, allow=True) == ("torch was 2.0, is 2.1",)
    assert environment_differences({"hostname": "a"}, {"hostname": "b"}) == []


def test_a_cell_is_claimed_once(directory):
    opened(directory, info(spec()))
    other = RunDirectory(directory.path)
    with directory.claim("k") as ours:
        assert ours
        with other.claim("k") as theirs, other.claim("l") as free:
            assert not theirs
            assert free
    with other.claim("k") as now:
        assert now


def test_a_claim_clears_what_a_dead_writer_left_but_not_a_living_ones(directory):
    opened(directory, info(spec()))
    cells = directory.path / "cells"
    (cells / "dead.json.tmp").write_text('{"half": ')
    (cells / "alive.json.tmp").write_text('{"half": ')
    other = RunDirectory(directory.path)
    with other.claim("alive"):
        (cells / "alive.json.tmp").write_text('{"half": ')
        with directory.claim("dead"), directory.claim("alive") as ours:
            assert not ours
        assert names(directory) == {"run.json", "alive.json.tmp"}
    assert directory.failures() == directory.results() == ()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(directory, monkeypatch, call):
    opened(directory, info(spec()))
    before = names(directory)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with directory.claim(spec().key):
        monkeypatch.setattr(os, call, full)
        with pytest.raises(SpectuneError, match="the disk is full") as caught:
            directory.write_failure(failed(spec()))
        monkeypatch.undo()
    assert caught.value.exit_code == 4
    assert names(directory) == before
    assert directory.info() == info(spec())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpectuneError, match="file"):
        opened(RunDirectory(tmp_path / "file" / "r"), info(spec()))


def test_a_damaged_file_is_named_with_a_way_out(directory):
    opened(directory, info(spec()))
    path = directory.path / "cells" / f"{spec().key}.json"
    for text in ("", "{", "[]", json.dumps({"schema_version": 2})):
        path.write_text(text)
        with pytest.raises(UsageError, match=path.name) as caught:
            directory.results()
        assert "remove it" in caught.value.hint
        assert "\n" not in caught.value.message


def test_no_run_is_not_read(directory):
    with pytest.raises(UsageError, match="is not a run"):
        directory.info()
    assert not directory.path.exists()


@pytest.mark.parametrize(
    ("target", "short"),
    [("org/Model-1B", "Model-1B"), ("./models/tiny/", "tiny"), ("..", ".."), ("/", "run"), ("ä b", "--b")],
)
def test_the_default_name_is_a_plain_folder_name(tmp_path, monkeypatch, target, short):
    monkeypatch.chdir(tmp_path)
    path = default_path(target)
    assert path.parent.name == "runs"
    assert path.name.endswith(f"Z-{short}")
    path.mkdir(parents=True)
    assert default_path(target) != path
