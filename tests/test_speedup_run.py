"""Reading run directories: what is accepted, and what stops the analysis."""

from __future__ import annotations

import json
import os

import pytest
from synthetic_run import bandwidth, cell, failed, write_run

from spectune.errors import CannotJudge, UsageError
from spectune.speedup.profile import profile
from spectune.speedup.run import find_run, load_run
from spectune.sweeping.cell import Reading


def test_cells_come_in_the_order_of_the_plan(tmp_path):
    cells = [cell(k=k) for k in (8, 1, 4)]
    run = load_run(write_run(tmp_path / "run", cells, [failed(k=16)]))
    assert [c.spec.k for c in run.cells] == [8, 1, 4]
    assert [f.spec.k for f in run.failed] == [16]


def test_a_failure_that_was_repaired_is_no_failure(tmp_path):
    run = load_run(write_run(tmp_path / "run", [cell(k=2)], [failed(k=2)]))
    assert (len(run.cells), len(run.failed)) == (1, 0)


def test_temporary_and_lock_files_are_ignored(tmp_path):
    path = write_run(tmp_path / "run", [cell()])
    (path / "cells" / "abc.json.tmp").write_text("{")
    (path / "cells" / "abc.lock").write_text("")
    assert len(load_run(path).cells) == 1


@pytest.mark.parametrize("what", ["missing", "file", "empty"])
def test_no_run_is_wrong_use(tmp_path, what):
    path = tmp_path / "run"
    if what == "file":
        path.write_text("{}")
    elif what == "empty":
        path.mkdir()
    with pytest.raises(UsageError):
        load_run(path)


@pytest.mark.parametrize("keep", [0, 1, 200, -1])
def test_a_truncated_cell_is_named(tmp_path, keep):
    path = write_run(tmp_path / "run", [cell()])
    file = next((path / "cells").iterdir())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UsageError, match=file.name):
        load_run(path)


def test_a_truncated_plan_is_named(tmp_path):
    path = write_run(tmp_path / "run", [cell()])
    (path / "run.json").write_text('{"name": "ru')
    with pytest.raises(UsageError, match=r"run\.json"):
        load_run(path)


def test_a_newer_schema_is_not_guessed_at(tmp_path):
    path = write_run(tmp_path / "run", [cell()])
    file = next((path / "cells").iterdir())
    document = json.loads(file.read_text())
    document["schema_version"] = 2
    document["something_new"] = True
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="schema version 2"):
        load_run(path)


def test_nan_and_changed_specs_are_refused(tmp_path):
    path = write_run(tmp_path / "run", [cell()])
    file = next((path / "cells").iterdir())
    text = file.read_text()
    file.write_text(text.replace('"warmup_seconds":0.5', '"warmup_seconds":NaN'))
    with pytest.raises(UsageError, match=file.name):
        load_run(path)
    file.write_text(text.replace('"batch":1', '"batch":2'))
    with pytest.raises(UsageError, match="key"):
        load_run(path)


def test_a_renamed_cell_file_is_refused(tmp_path):
    path = write_run(tmp_path / "run", [cell()])
    file = next((path / "cells").iterdir())
    file.rename(file.with_name("copy.json"))
    with pytest.raises(UsageError, match=r"copy\.json"):
        load_run(path)


def test_cells_of_different_settings_are_not_compared(tmp_path):
    with pytest.raises(UsageError, match="dtype"):
        load_run(write_run(tmp_path / "a", [cell(k=1), cell(k=2, dtype="bfloat16")]))
    with pytest.raises(UsageError, match="two cells"):
        load_run(write_run(tmp_path / "b", [cell(), cell(suite_digest="other")]))


def test_no_finished_cell_cannot_be_judged_and_the_failures_are_counted(tmp_path):
    path = write_run(tmp_path / "run", failures=[failed(k=1), failed(k=2)])
    with pytest.raises(CannotJudge, match="2 failed"):
        load_run(path)
    assert load_run(path, allow_empty=True).cells == ()


def test_the_newest_run_is_found(tmp_path):
    with pytest.raises(UsageError) as caught:
        find_run(None, tmp_path / "runs")
    assert "name one" in caught.value.hint
    for n, name in enumerate(("new", "old")):
        path = write_run(tmp_path / "runs" / name, [cell()])
        os.utime(path / "run.json", (1000 - n, 1000 - n))
    assert find_run(None, tmp_path / "runs").name == "new"
    assert find_run(tmp_path, tmp_path / "runs") == tmp_path


@pytest.mark.parametrize(
    ("device", "used", "refused"), [("cuda:0", 1.3, True), ("cuda:0", 1.05, False), ("cpu", 3.0, False)]
)
def test_a_gpu_time_shorter_than_its_bytes_take_has_no_speed(device, used, refused):
    """A CPU may hold the weights in its caches."""
    fast = bandwidth(mbu_speculative=Reading(value=used, source="model"))
    found = profile(cell(device=device).model_copy(update={"bandwidth": fast}))
    assert (found.speedup.value is None) == refused
    assert ("no time can be so short" in (found.excluded or "")) == refused
