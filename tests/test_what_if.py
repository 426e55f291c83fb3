"""`spectune predict`: acceptance travels, latency comes from surfaces or a device table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from synthetic_run import STEP, cell, model, strict_json, write_run

from spectune.errors import UsageError
from spectune.speedup.devices import device, device_of, devices
from spectune.speedup.elsewhere import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, draw, efficiency_of
from spectune.speedup.positions import length_draws
from spectune.speedup.profile import profiles
from spectune.speedup.run import load_run
from spectune.speedup.surface import Point, fit_surface
from spectune.speedup.what_if import what_if
from spectune.sweeping.cell import RoundCount

RATE = 0.8
TOKEN, WEIGHTS = 0.0002, 0.010  # seconds per batched token and of the weights: a linear surface


def geometric_rounds(k, rate=RATE, rounds=1000):
    """Counts of a draft whose every token is kept with the same chance."""
    chances = [rate**i * (1 - rate) for i in range(k)] + [rate**k]
    return tuple(
        RoundCount(drafted=k, accepted=i, count=n) for i, c in enumerate(chances) if (n := round(rounds * c)) > 0
    )


def length(k, rate=RATE):
    return sum(rate**i for i in range(k + 1))


def target_seconds(batch, query):
    return WEIGHTS + TOKEN * batch * query


def timed(k, batch, cost_ratio=0.1):
    """A cell whose passes took what the cost model says, without overhead."""
    plain, verify = target_seconds(batch, 1), target_seconds(batch, k + 1)
    draft = k * cost_ratio * STEP
    made = cell(k=k, batch=batch, rounds=geometric_rounds(k), speedup=length(k) * plain / (draft + verify))
    passes = []
    for p in made.passes:
        own = {"verify_mean": plain} if p.mode == "plain" else {"verify_mean": verify, "draft_mean": draft}
        own |= {"overhead_mean": 0.0, "draft_steps_mean": 0.0 if p.mode == "plain" else float(k)}
        passes.append(p.model_copy(update={"times": p.times.model_copy(update=own)}))
    return made.model_copy(update={"passes": tuple(passes)})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("what-if") / "run"
    return write_run(folder, [timed(k, b) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)])


@pytest.fixture(scope="module")
def loaded(run):
    found = load_run(run)
    return found, profiles(found)


def big(name, parameters, layers):
    """Sizes of a model in bfloat16."""
    changes = {"parameters": parameters, "weight_bytes_per_step": 2 * parameters, "kv_bytes_per_token": 131072}
    return model(name).model_copy(update={**changes, "layers": layers, "dtype": "bfloat16"})


@pytest.fixture(scope="module")
def big_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("what-if") / "big"
    drafters = {"draft": big("draft", 1_000_000_000, 16)}
    changes = {"target": big("target", 8_000_000_000, 32), "drafters": drafters}
    found = load_run(write_run(folder, [timed(k, b) for k in (2, 4, 6) for b in (1, 4)], **changes))
    return found, profiles(found)


def test_acceptance_lengths_are_those_counted_and_go_on_beyond_the_largest_k():
    found = length_draws([timed(4, 1)], 8, 50)
    assert found.shape == (51, 8)
    assert found[0] == pytest.approx([length(k) for k in range(1, 9)], rel=0.04)
    assert found[0, 3] == pytest.approx(length(4), rel=0.01)


def test_rounds_without_a_draft_lower_the_acceptance_length():
    half = (RoundCount(drafted=4, accepted=4, count=10), RoundCount(drafted=0, accepted=0, count=10))
    # Ten rounds of five tokens each take 5/2, 5/3, 5/4 and one round.
    expected = [60 / (10 + 50 / (k + 1)) for k in (1, 2, 3, 4)]
    assert length_draws([cell(rounds=half)], 4, 10)[0] == pytest.approx(expected)


def test_forced_rounds_are_cut_at_a_smaller_k():
    rates = (0.9, 0.5, 0.1)
    counts = {0: 100, 1: 450, 2: 405, 3: 45}
    rounds = tuple(RoundCount(drafted=3, accepted=a, count=n) for a, n in counts.items())
    found = length_draws([cell(k=3, rounds=rounds, synthetic=rates)], 3, 10)
    assert found[0] == pytest.approx([1.9, 2.35, 2.395])


def test_here_the_prediction_follows_the_cost_model_where_nothing_was_measured(loaded):
    (found,) = what_if(*loaded, [3, 5], [3, 6]).predictions
    for row in found.rows:
        plain, verify = target_seconds(row.batch, 1), target_seconds(row.batch, row.k + 1)
        expected = length(row.k) * plain / (row.k * 0.1 * STEP + verify)
        assert row.speedup.value == pytest.approx(expected, rel=0.03)
        assert row.speedup.low <= row.speedup.value <= row.speedup.high
        assert row.in_all.value == pytest.approx(row.batch * row.per_user.value)
        assert not row.extrapolated


def test_beyond_twice_the_measured_range_a_prediction_is_called_extrapolated(loaded):
    (found,) = what_if(*loaded, [4, 12, 13], [8, 64]).predictions
    marked = {(r.k, r.batch): r.extrapolated for r in found.rows}
    assert marked == {(4, 8): False, (12, 8): False, (13, 8): True, (4, 64): True, (12, 64): True, (13, 64): True}


def test_the_best_k_falls_with_the_batch_and_the_crossover_is_between(loaded):
    (found,) = what_if(*loaded, range(1, 13), [1, 4, 16, 64, 256]).predictions
    best = list(found.best.values())
    assert best == sorted(best, reverse=True)
    assert best[0] >= 4
    assert best[-1] == 0
    assert 16 < found.crossover.value < 256


def test_on_a_gpu_memory_bound_decoding_pays_and_a_large_batch_does_not(big_run):
    (found,) = what_if(*big_run, [1, 4, 8], [1, 2048], gpu=device("h100")).predictions
    rows = {(r.k, r.batch): r for r in found.rows}
    one = rows[4, 1]
    assert one.verdict == "FASTER"
    # 3.36 tokens for 1 + 4/8 steps and what overheads there are: between 1.4 and 2.24.
    assert 1.4 < one.speedup.value < 2.24
    assert rows[8, 2048].speedup.high < 1
    assert found.best[2048] == 0
    assert 1 < found.crossover.value < 2048


def test_a_gpu_with_more_bandwidth_decodes_faster_and_the_speedup_hardly_changes(big_run):
    speeds = {g: what_if(*big_run, [4], [1], gpu=device(g)).predictions[0].rows[0] for g in ("l40s", "h200")}
    assert speeds["h200"].per_user.low > speeds["l40s"].per_user.high
    assert speeds["h200"].speedup.value == pytest.approx(speeds["l40s"].speedup.value, rel=0.3)


def test_a_forward_is_never_faster_than_the_peaks_allow(big_run):
    run, _ = big_run
    h100 = device("h100")
    drawn = draw(h100, efficiency_of(None, run.info.target, None), 200)
    for rows, query in itertools.product((1, 64), (1, 8)):
        seconds = drawn.seconds(run.info.target, np.array([[rows]]), query, 1000.0)
        memory = (16e9 + 131072 * rows * 1000) / h100.bandwidth
        compute = 16e9 * rows * query / h100.flops
        assert seconds.min() > max(memory, compute)


def test_what_does_not_fit_the_memory_is_said_and_not_recommended(big_run):
    (found,) = what_if(*big_run, [4], [1, 4], gpu=device("t4")).predictions
    assert [r.fits for r in found.rows] == [False, False]
    assert set(found.best.values()) == {0}


def test_efficiencies_of_the_runs_own_gpu_narrow_the_ranges():
    h100, target = device("h100"), big("target", 8_000_000_000, 32)
    memory, compute, fixed = 0.8, 0.6, 32 * 1e-5
    points = []
    for rows, query, context in itertools.product((1, 4, 16, 64, 256), (1, 4, 8), (100, 1000, 4000)):
        reading = (16e9 + 131072 * rows * context) / h100.bandwidth / memory
        computing = 16e9 * rows * query / h100.flops / compute
        points.append(Point(rows, query, context, fixed + (reading**4 + computing**4) ** 0.25))
    found = efficiency_of(fit_surface(points).best, target, device_of("NVIDIA H100 80GB HBM3"))
    assert {"compute", "memory"} <= set(found.measured)
    assert found.memory == pytest.approx((memory, memory), rel=0.05)
    assert found.compute == pytest.approx((compute, compute), rel=0.05)
    elsewhere = efficiency_of(fit_surface(points).best, target, None)
    assert (elsewhere.memory, elsewhere.compute, elsewhere.measured) == (MEMORY_EFFICIENCY, COMPUTE_EFFICIENCY, ())


def test_devices_are_found_by_their_names_and_their_drivers_names():
    assert device("H100").name == "H100 SXM"
    assert device("A100-80GB") is device("a100")
    assert device("rtx4090").name == "RTX 4090"
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA L4": "l4",
        "NVIDIA L40S": "l40s",
        "Tesla T4": "t4",
        "NVIDIA GeForce RTX 5090": "rtx-5090",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {name: device_of(name).key for name in names} == names
    assert device_of("NVIDIA GeForce GTX 1080") is None
    assert len(devices()) == 14
    with pytest.raises(UsageError, match="h100"):
        device("h99")


def test_trees_and_unidentifiable_acceptance_have_reasons_and_no_numbers(tmp_path):
    cells = [cell(drafter="tree:draft", drafter_digest="x"), cell(k=1, rounds=geometric_rounds(1))]
    found = load_run(write_run(tmp_path / "run", cells, drafters={"tree:draft": None, "draft": None}))
    tree, one = what_if(found, profiles(found), [4], [1], gpu=device("h100")).predictions
    assert (tree.rows, one.rows) == ((), ())
    assert "trees" in tree.reason
    assert "beyond K 1" in one.reason


def test_predict_prints_estimates_only(run, spectune):
    code, out, _ = spectune("predict", run, "--k", "1-12", "--batch", "1-256", "--gpu", "h100", "--json")
    document = strict_json(out)
    assert (code, document["estimate"], document["latency_from"]) == (0, True, "device table")
    assert len(document["predictions"][0]["rows"]) == 12 * 256
    code, out, _ = spectune("predict", run, "--k", "1-4", "--gpu", "h100")
    assert code == 0
    assert "ESTIMATE, not measured" in out
    assert "assumed" in out
    code, _, err = spectune("predict", run, "--gpu", "h99")
    assert (code, "choose from" in err) == (2, True)
    code, _, err = spectune("predict", run, "--k", "1-1000", "--batch", "1-1000")
    assert (code, "ask for fewer" in err) == (2, True)


def test_one_drafter_is_predicted_as_beside_the_others(tmp_path):
    """The target's times are those of all cells, whoever drafted."""
    cells = [timed(k, b) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)]
    spec = timed(4, 1).spec.model_copy(update={"drafter": "other"})
    other = timed(4, 1).model_copy(update={"spec": spec, "key": spec.key})
    found = load_run(write_run(tmp_path / "run", [*cells, other]))
    every = profiles(found)
    both = what_if(found, every, [4], [1, 4]).predictions
    (alone,) = what_if(found, every, [4], [1, 4], drafters=["other"]).predictions
    assert alone == next(p for p in both if p.drafter == "other")
    measured = next(p for p in every if p.spec.drafter == "other").speedup.value
    assert alone.rows[0].speedup.value == pytest.approx(measured, rel=0.05)


def test_predict_takes_the_asked_drafter_alone(tmp_path, spectune):
    cells = [timed(k, b) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)]
    spec = timed(4, 1).spec.model_copy(update={"drafter": "other"})
    other = timed(4, 1).model_copy(update={"spec": spec, "key": spec.key})
    both = write_run(tmp_path / "run", [*cells, other])
    code, out, _ = spectune("predict", both, "--draft", "other", "--k", "4", "--json")
    assert code == 0
    assert [p["drafter"] for p in strict_json(out)["predictions"]] == ["other"]
    assert spectune("predict", both, "--draft", "third")[0] == 2


def test_predict_shows_the_best_drafter_by_batch_and_each_with_all(tmp_path, spectune):
    cells = [timed(k, b) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)]
    spec = timed(4, 1).spec.model_copy(update={"drafter": "tree:other"})
    other = timed(4, 1).model_copy(update={"spec": spec, "key": spec.key})
    dear = [timed(k, b, cost_ratio=0.6) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)]
    first = [c.spec.model_copy(update={"drafter": "a-dear-one"}) for c in dear]
    copies = [c.model_copy(update={"spec": s, "key": s.key}) for c, s in zip(dear, first, strict=True)]
    both = write_run(tmp_path / "run", [*copies, *cells, other])
    _, out, _ = spectune("predict", both, "--k", "4", "--batch", "1,4")
    rows = [line.split()[:3] for line in out.splitlines() if ", K 4" in line]
    assert rows == [["1", "draft,", "K"], ["4", "draft,", "K"]]
    assert "tree:other: trees are not predicted" in out
    _, out, _ = spectune("predict", both, "--k", "4", "--batch", "1,4", "--all")
    assert out.count("estimate: code: ") == 2


def test_where_no_drafter_is_faster_the_verdict_says_whether_that_is_known(tmp_path, spectune):
    cells = [timed(k, b) for k in (1, 2, 4, 6) for b in (1, 2, 4, 8)]
    first = [c.spec.model_copy(update={"drafter": "another"}) for c in cells]
    copies = [c.model_copy(update={"spec": s, "key": s.key}) for c, s in zip(cells, first, strict=True)]
    both = write_run(tmp_path / "run", [*copies, *cells])
    _, out, _ = spectune("predict", both, "--k", "4", "--batch", "1,1024")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert ", K 4" in rows["1"]
    assert "OFF (SLOWER)" in rows["1024"]
