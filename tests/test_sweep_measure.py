"""One cell: warm-up, order of passes, counts that must fit together, warnings."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
from fake_engine import FakeEngine

from spectune.engines.engine import Requests
from spectune.errors import SpectuneError, UsageError
from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping.cell import Bandwidth, CellSpec, MemoryPlan, OutputCheck, Reading, Sampling
from spectune.sweeping.figures import figures
from spectune.sweeping.measure import check_counts, measure_cell, pass_order
from spectune.sweeping.warning import cell_warnings

SUITE = Suite("code", "test", tuple(Prompt(f"p{n}", "all", text="x") for n in range(4)))


class StillGauge:
    """A gauge that reads nothing."""

    def watch(self):
        return nullcontext()

    def assess(self, spec, passes):
        null = Reading(value=None, reason="not read")
        names = set(Bandwidth.model_fields) - {"bytes_per_plain_step", "bytes_per_round", "throttle_reasons"}
        return Bandwidth(bytes_per_plain_step=1, bytes_per_round=1, **dict.fromkeys(names, null)), ("hm",)


def spec(**changes) -> CellSpec:
    plain = {
        "target": "t",
        "target_digest": "d",
        "drafter": "ngram",
        "drafter_digest": "none",
        "suite": "code",
        "suite_digest": SUITE.digest,
        "k": 4,
        "batch": 2,
        "rule": "greedy",
        "max_new_tokens": 64,
        "chat_template": True,
        "dtype": "float32",
        "device": "cpu",
        "draft_device": "cpu",
    }
    return CellSpec(**(plain | changes))


def measure(cell: CellSpec, engine: FakeEngine, suite: Suite = SUITE, **more):
    return measure_cell(engine, cell, engine.render(cell, suite), gauge=StillGauge(), **more)


def test_first_use_of_a_shape_is_never_measured():
    engine = FakeEngine(first_use_seconds=0.2)
    results = [measure(spec(k=k, batch=batch, repeats=2), engine) for k, batch in ((4, 1), (8, 1), (4, 2))]
    for result in results:
        assert result.warmup_seconds > 0.15
        assert len(result.passes) == 4  # every repeat is kept
        assert max(p.wall_seconds for p in result.passes) < 0.1


def test_passes_alternate_and_neither_mode_always_begins():
    begins = Counter()
    for seed in range(64):
        order = pass_order(spec(repeats=4, seed=seed))
        modes = [mode for _, pair in order for mode in pair]
        assert [repeat for repeat, _ in order] == [0, 1, 2, 3]
        assert modes[:4] == modes[4:]
        assert modes[0] == modes[3] != modes[1] == modes[2]
        begins[modes[0]] += 1
    assert min(begins["plain"], begins["speculative"]) > 16
    result = measure(spec(repeats=2), FakeEngine())
    assert [p.order for p in result.passes] == [0, 1, 2, 3]


def test_only_generated_tokens_count():
    lengths = {"p0": 3, "p1": 64}
    suite = Suite("code", "test", SUITE.prompts[:2])
    result = measure(spec(), FakeEngine(lengths=lambda request: lengths[request.id]), suite)
    for done in result.passes:
        assert sum(r.output_tokens for r in done.requests) == 67
        short = next(r for r in done.requests if r.id == "p0")
        assert sum(c.count for c in short.rounds) <= 2


@pytest.mark.parametrize("limit", [1, 2])
def test_outputs_of_one_or_two_tokens_give_no_speed_and_no_error(limit):
    result = measure(spec(max_new_tokens=limit), FakeEngine())
    found = figures(result)
    if limit == 1:
        assert found.speedup is found.acceptance_length is found.plain_tokens_per_second is None
    assert found.acceptance_rate is None  # one token left: nothing fits behind it


def test_identical_tokens_are_checked_across_modes_and_repeats():
    assert measure(spec(repeats=2), FakeEngine()).output_check == OutputCheck(verdict="identical")
    for gap, verdict, warning in (
        (1.0, "different", "tokens-differ: "),
        (0.1, "numeric ties", "numeric-ties: "),
    ):
        varied = measure(spec(repeats=2), FakeEngine(vary=True, gap=gap))
        assert varied.output_check.verdict == verdict
        assert varied.output_check.differences
        assert any(w.startswith(warning) for w in varied.warnings)
    sampled = spec(rule="speculative", sampling=Sampling(temperature=1.0))
    assert measure(sampled, FakeEngine(vary=True)).output_check is None
    matched = spec(rule="match", sampling=Sampling(temperature=1.0))
    assert measure(matched, FakeEngine()).output_check.verdict == "identical"


def test_warnings_name_what_is_wrong():
    result = measure(spec(), FakeEngine(lengths=lambda request: 3), notes=("other-environment: cpu",))
    names = [warning.split(":")[0] for warning in result.warnings]
    assert names[0] == "other-environment"
    assert "outputs-short" in names
    assert names[-1] == "bandwidth"
    assert "outputs-short" not in str(measure(spec(max_new_tokens=2), FakeEngine()).warnings)


def test_unstable_repeats_and_low_occupancy_are_told():
    engine = FakeEngine()
    steady = engine.run_pass

    def drifting(*args, **more):
        done = steady(*args, **more)
        slow = 1 + more["repeat"]
        requests = [
            r.model_copy(update={"full_seconds": r.full_seconds * slow, "full_tokens": r.full_tokens // 4})
            for r in done.requests
        ]
        return done.model_copy(update={"requests": tuple(requests)})

    engine.run_pass = drifting
    result = measure(spec(repeats=2), engine)
    names = [warning.split(":")[0] for warning in result.warnings]
    assert names.count("unstable") == 2
    assert "low-occupancy" in names


def test_throughput_counts_the_batch_once():
    # Two rows, one token per round each, 10 ms a round: 200 tokens a second.
    assert figures(measure(spec(), FakeEngine())).plain_tokens_per_second == pytest.approx(200)


@pytest.mark.parametrize(
    "change",
    [
        {"output_tokens": 64 * 4 + 70},  # more than the rounds can have emitted
        {"output_tokens": 3},  # fewer than were accepted
        {"id": "other"},
    ],
)
def test_counts_that_contradict_each_other_are_an_error(change):
    engine, cell = FakeEngine(), spec()
    requests = engine.render(cell, SUITE).requests
    done = engine.run_pass(cell, requests, mode="speculative", repeat=0, order=0)
    check_counts(cell, requests, done)
    wrong = done.requests[0].model_copy(update=change)
    with pytest.raises(SpectuneError, match="miscounted"):
        check_counts(cell, requests, done.model_copy(update={"requests": (wrong, *done.requests[1:])}))


def test_a_plain_pass_must_not_draft():
    engine, cell = FakeEngine(), spec()
    requests = engine.render(cell, SUITE).requests
    done = engine.run_pass(cell, requests, mode="speculative", repeat=0, order=0)
    with pytest.raises(SpectuneError, match="drafted more than 0"):
        check_counts(cell, requests, done.model_copy(update={"mode": "plain"}))


def test_left_out_prompts_are_told_and_none_left_is_an_error():
    engine, cell = FakeEngine(), spec()
    requests = engine.render(cell, SUITE).requests
    told = measure_cell(engine, cell, Requests(requests, ("p9: too long",)), gauge=StillGauge())
    assert "prompts-left-out: p9: too long" in told.warnings
    with pytest.raises(UsageError, match="p9: too long"):
        measure_cell(engine, cell, Requests((), ("p9: too long",)), gauge=StillGauge())


class RecordingEngine(FakeEngine):
    """Says that it keeps recordings, and that one could not be made."""

    def recorded_bytes(self) -> int:
        return 4321

    def unrecorded(self) -> tuple[str, ...]:
        return ("the model asks the host",)


def test_recordings_stand_in_the_memory_plan_and_what_was_not_recorded_in_the_warnings():
    plan = MemoryPlan(weight_bytes=1, kv_bytes=2, logits_bytes=3, layer_bytes=4)
    result = measure(spec(), RecordingEngine(), memory=plan)
    assert result.memory.plan.graph_bytes == 4321
    assert result.memory.predicted_bytes == 1 + 2 + 3 + 4 + 4321
    assert any(w.startswith("not-recorded: the model asks the host") for w in result.warnings)
    assert "not-recorded" not in str(measure(spec(), FakeEngine()).warnings)


def test_a_drafter_at_rest_is_not_warned_about_for_drafting_nothing():
    assert not any("nothing-drafted" in w for w in measure(spec(k=0), FakeEngine()).warnings)
    silent = measure(spec(k=0), FakeEngine()).passes
    assert any("nothing-drafted" in w for w in cell_warnings(spec(k=4), silent, None))
