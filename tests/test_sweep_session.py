"""Whole sweeps on the scripted engine, in this process."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace

import pytest
from fake_engine import FakeEngine, model

from spectune.errors import SpectuneError, UsageError
from spectune.interrupts import interrupts
from spectune.sweeping import session
from spectune.sweeping.config import settings
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.session import prepare, run
from spectune.sweeping.summary import as_json, as_text, closing
from spectune.sweeping.sweep import Interrupted, failure_message, failure_reason


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"prompt {n}"}) + "\n" for n in range(4)))

    def make(**changes) -> SweepOptions:
        usual = {
            "suites": (str(path),),
            "ks": (1, 2, 4),
            "drafts": ("ngram", "small"),
            "peak_bandwidth": 100.0,
        }
        return SweepOptions(**(usual | changes))

    return make


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    here: dict[str, object] = {"torch": "1", "device": "cpu"}
    monkeypatch.setattr(session, "fingerprint", lambda device: here)
    return here


def essence(directory) -> dict[str, object]:
    """All cells without what the clock decides."""
    cells = {}
    for result in RunDirectory(directory).results():
        cell = result.model_dump(exclude={"started_at", "finished_at", "warmup_seconds"})
        for done in cell["passes"]:
            del done["wall_seconds"]
        cells[result.key] = cell
    return cells


def test_a_sweep_measures_every_cell(tmp_path, options):
    outcome = run(options(), engine=FakeEngine(), output=tmp_path / "r")
    assert len(outcome.plan) == len(outcome.results) == 6
    assert outcome.failures == outcome.elsewhere == ()
    assert outcome.exit_code == 0
    assert [r.key for r in outcome.results] == [s.key for s in outcome.plan]
    info = RunDirectory(tmp_path / "r").info()
    assert info.plan == outcome.plan
    assert info.name == "r"
    assert info.command[:2] == ("spectune", "sweep")
    assert info.drafters["ngram"] is None
    assert info.drafters["small"].name == "small"


def test_the_order_of_cells_does_not_change_results(tmp_path, options):
    run(options(batches=(1, 3)), engine=FakeEngine(), output=tmp_path / "a")
    turned = options(batches=(3, 1), ks=(4, 1, 2), drafts=("small", "ngram"))
    run(turned, engine=FakeEngine(), output=tmp_path / "b")
    assert essence(tmp_path / "a") == essence(tmp_path / "b")
    assert len(essence(tmp_path / "a")) == 12


class OutOfMemoryError(RuntimeError):
    pass


def test_a_sweep_survives_failing_cells_and_resumes_exactly(tmp_path, options):
    ks = (1, 2, 3, 4, 5, 6)
    grid = options(ks=ks, drafts=("ngram",))

    def fail(spec):
        return {3: OutOfMemoryError("CUDA out of memory"), 5: KeyboardInterrupt()}.get(spec.k)

    engine = FakeEngine(failures=fail)
    with pytest.raises(Interrupted) as caught:
        run(grid, engine=engine, output=tmp_path / "r")
    assert caught.value.exit_code == 130
    assert caught.value.message == "interrupted; 3 of 6 cells are finished"
    assert caught.value.hint.endswith(f"--output {tmp_path / 'r'} --resume")
    directory = RunDirectory(tmp_path / "r")
    assert [r.spec.k for r in directory.results()] == [1, 2, 4]
    (failure,) = directory.failures()
    assert (failure.spec.k, failure.reason) == (3, "oom")
    fourth = next(s.key for s in directory.info().plan if s.k == 4)
    assert engine.log.index(("release", "")) < engine.log.index(("warm_up", fourth))

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "r" / "cells").glob("*.json")}
    again = FakeEngine()
    outcome = run(grid, engine=again, output=tmp_path / "r", resume=True)
    assert [r.spec.k for r in outcome.results] == list(ks)
    assert directory.failures() == ()
    assert [what for what, _ in again.log].count("warm_up") == 3  # K 3, 5 and 6
    for path, written in before.items():
        assert path.name.endswith(".failed.json") or path.stat().st_mtime_ns == written

    other = FakeEngine()
    run(options(ks=(6, 7), drafts=("ngram",)), engine=other, output=tmp_path / "r", resume=True)
    assert [what for what, _ in other.log].count("warm_up") == 1
    assert [s.k for s in directory.info().plan] == [*ks, 7]
    run(options(ks=(1, 2), drafts=("ngram",)), engine=FakeEngine(), output=tmp_path / "whole")
    whole = essence(tmp_path / "whole")
    assert {k: v for k, v in essence(tmp_path / "r").items() if k in whole} == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("becomes", ["an error", "nothing"])
def test_an_interruption_that_a_library_turns_into_something_else_still_ends_the_sweep(
    tmp_path, options, number, becomes
):
    def careless(spec):
        if spec.k != 2:
            return None
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            if becomes == "an error":
                raise RuntimeError("error calling function: KeyboardInterrupt") from None
        return None

    former = signal.signal(number, signal.default_int_handler)  # not ignored, as it is in a shell's background
    try:
        with pytest.raises(Interrupted, match=f"{2 if becomes == 'nothing' else 1} of 3 cells are finished"):
            run(options(ks=(1, 2, 3), drafts=("ngram",)), engine=FakeEngine(failures=careless), output=tmp_path / "r")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, former)
    assert RunDirectory(tmp_path / "r").failures() == ()


def test_a_block_inside_another_knows_of_an_interruption_that_was_dropped_before_it():
    seen = []

    def dropped() -> None:
        with interrupts():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except KeyboardInterrupt:
                pass
            with interrupts() as inner:
                seen.append(inner.asked)

    with pytest.raises(KeyboardInterrupt):
        dropped()
    assert seen == [True]
    with interrupts() as later:
        assert not later.asked


def test_a_warning_that_a_cell_has_twice_counts_as_one_cell(tmp_path, options):
    outcome = run(options(ks=(2,), drafts=("ngram",)), engine=FakeEngine(), output=tmp_path / "r")
    (result,) = outcome.results
    twice = result.model_copy(update={"warnings": ("unstable: plain; x", "unstable: speculative; x", "other: y")})
    said = closing(replace(outcome, results=(twice,)))
    assert "warning unstable in 1 of 1 cells" in said
    assert "warning other in 1 of 1 cells" in said


def test_every_cell_failing_is_a_failed_run_without_a_speedup(tmp_path, options):
    engine = FakeEngine(failures=lambda spec: ValueError("broken\nsecond line"))
    outcome = run(options(), engine=engine, output=tmp_path / "r")
    assert outcome.exit_code == 4
    assert len(outcome.failures) == 6
    assert "every cell failed" in closing(outcome)
    assert "recommend" not in closing(outcome)
    assert as_json(outcome)["results"] == []
    assert as_json(outcome)["next"] is None
    assert "ValueError at fake_engine.py:" in outcome.failures[0].message
    assert "\n" not in outcome.failures[0].message


def test_failed_cells_are_tried_again_once(tmp_path, options):
    calls = []

    def fail(spec):
        calls.append(spec.k)
        return ValueError("no")

    for resume in (False, True):
        run(
            options(drafts=("ngram",)),
            engine=FakeEngine(failures=fail),
            output=tmp_path / "r",
            resume=resume,
        )
    assert calls == [1, 2, 4] * 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemoryError("x"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("shape mismatch"), "error"),
        (ValueError("out of memory of better days"), "error"),
        (UsageError("no prompt fits"), "refused"),
        (SpectuneError("miscounted"), "error"),
    ],
)
def test_failures_are_told_apart(error, reason):
    assert failure_reason(error) == reason
    assert "\n" not in failure_message(error)


def test_an_engine_that_cannot_go_on_ends_the_sweep(tmp_path, options):
    engine = FakeEngine(failures=lambda spec: RuntimeError("illegal memory access"))

    def release():
        raise RuntimeError("illegal memory access")

    engine.release = release
    with pytest.raises(SpectuneError, match="cannot go on"):
        run(options(), engine=engine, output=tmp_path / "r")


def test_a_draft_that_cannot_work_is_refused_before_anything_is_measured(tmp_path, options):
    engine = FakeEngine()
    with pytest.raises(UsageError, match="misfit"):
        run(options(drafts=("ngram", "misfit")), engine=engine, output=tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert engine.log == []


def test_a_run_that_exists_is_refused_before_a_model_is_loaded(tmp_path, options, monkeypatch):
    run(options(), engine=FakeEngine(), output=tmp_path / "r")
    monkeypatch.setattr(session, "load_engine", lambda options: pytest.fail("loaded"))
    with pytest.raises(UsageError, match="holds a run already") as caught:
        run(options(), output=tmp_path / "r")
    assert caught.value.hint.startswith("spectune sweep")
    assert caught.value.hint.endswith("--resume")


def test_resume_needs_a_name_and_may_start_a_run(tmp_path, options):
    with pytest.raises(UsageError, match="which run"):
        run(options(), engine=FakeEngine(), resume=True)
    assert run(options(), engine=FakeEngine(), output=tmp_path / "new", resume=True).results


def test_another_target_of_the_same_name_is_refused(tmp_path, options):
    run(options(), engine=FakeEngine(), output=tmp_path / "r")
    other = FakeEngine(target=model("fake-target", digest="retrained"))
    with pytest.raises(UsageError, match="target_digest is"):
        run(options(), engine=other, output=tmp_path / "r", resume=True)


def test_another_environment_is_recorded_in_the_cells(tmp_path, options, environment):
    run(options(ks=(1,)), engine=FakeEngine(), output=tmp_path / "r")
    environment["torch"] = "2"
    more = {"engine": FakeEngine(), "output": tmp_path / "r", "resume": True}
    with pytest.raises(UsageError, match="torch was"):
        run(options(ks=(2,)), **more)
    environment_of_first = RunDirectory(tmp_path / "r").info().environment
    outcome = run(options(ks=(1, 2)), **more, allow_env_mismatch=True)
    noted = [r.spec.k for r in outcome.results if any("other-environment" in w for w in r.warnings)]
    assert noted == [2, 2]
    assert RunDirectory(tmp_path / "r").info().environment == environment_of_first


def test_a_dry_run_writes_and_measures_nothing(tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    engine = FakeEngine()
    outcome = run(options(), engine=engine, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert engine.log == []
    assert outcome.directory is None
    # 4 prompts of 128 tokens, two passes, 6 cells; 4 MB of weights at 100 GB/s
    assert outcome.estimate.tokens == 4 * 128 * 2 * 6
    assert outcome.estimate.seconds == pytest.approx(6144 * 4e6 / 100e9, rel=0.05)
    assert outcome.estimate.weight_bytes == 4 * (1_000_000 + 100_000)
    assert outcome.estimate.kv_bytes == (5 + 128 + 4) * 1024
    text = as_text(outcome)
    assert all(word in text for word in ("cells   6", "at least", "bandwidth ceiling", "theory", "memory"))
    assert as_json(outcome)["dry_run"] is True
    json.dumps(as_json(outcome), allow_nan=False)


def test_layers_of_the_target_need_no_memory_of_their_own(options):
    engine = FakeEngine()
    small = options(drafts=("ngram",))
    engine.drafter = lambda name: model("part", digest=f"{engine.target.digest}/part")
    part = run(small, engine=engine, dry_run=True).estimate
    whole = run(small, engine=FakeEngine(), dry_run=True).estimate
    assert (part.weight_bytes, part.kv_bytes) == (whole.weight_bytes, whole.kv_bytes)


def test_cells_that_another_process_holds_are_left_to_it(tmp_path, options):
    run(options(ks=(1,)), engine=FakeEngine(), output=tmp_path / "r")
    held = run(options(ks=(2,)), engine=FakeEngine(), dry_run=True).plan[0].key
    more = {"engine": FakeEngine(), "output": tmp_path / "r", "resume": True}
    with RunDirectory(tmp_path / "r").claim(held):
        outcome = run(options(ks=(1, 2)), **more)
    assert outcome.elsewhere == (held,)
    assert len(outcome.results) == 3
    assert "1 cells are still being measured" in closing(outcome)


def test_a_full_disk_ends_the_sweep_and_keeps_the_run(tmp_path, options, monkeypatch):
    sync, writes = os.fsync, []

    def fill_up(descriptor):
        writes.append(descriptor)
        if len(writes) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_up)
        with pytest.raises(SpectuneError, match="the disk is full") as caught:
            run(options(), engine=FakeEngine(), output=tmp_path / "r")
    assert caught.value.exit_code == 4
    kept = len(RunDirectory(tmp_path / "r").results())
    assert kept == 2
    assert not list((tmp_path / "r").rglob("*.tmp"))
    outcome = run(options(), engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert len(outcome.results) == 6


def test_one_token_outputs_still_give_a_summary(tmp_path, options):
    outcome = run(options(max_new_tokens=1), engine=FakeEngine(), output=tmp_path / "r")
    assert {r["speedup"] for r in as_json(outcome)["results"]} == {None}
    json.dumps(as_json(outcome), allow_nan=False)


def test_settings_of_the_model_and_the_chat_template(options):
    from spectune.suites import load_suite
    from spectune.sweeping.cell import Sampling

    engine = FakeEngine(defaults=Sampling(temperature=0.6, top_k=20))
    grid = options(model_sampling=True, top_k=5)
    suites = [load_suite(grid.suites[0])]
    (first, *_) = prepare(grid, engine, suites).plan
    assert first.sampling == Sampling(temperature=0.6, top_k=5)
    assert first.rule == "speculative"
    assert first.chat_template is None  # each prompt's own form decides
    for chat in (True, False):
        assert prepare(options(chat=chat), engine, suites).plan[0].chat_template is chat


def test_k_0_is_a_cell_of_its_own_that_no_theory_is_about(tmp_path, options):
    outcome = run(options(ks=(0, 2)), engine=FakeEngine(), output=tmp_path / "r")
    assert {r.spec.k for r in outcome.results} == {0, 2}
    assert {draft.k for draft in outcome.card.drafts} == {2}
    for cell in outcome.results:
        if cell.spec.k == 0:
            assert not any(c.drafted for p in cell.passes for r in p.requests for c in r.rounds)
    (tmp_path / "c.toml").write_text('[sweep]\nk = "0,2"\n')
    assert settings({}, tmp_path / "c.toml").options.ks == (0, 2)
    with pytest.raises(UsageError, match="--batch takes counts from 1"):
        options(batches=(0, 1))
