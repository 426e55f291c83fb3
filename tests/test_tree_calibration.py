"""What static trees are planned from is measured right, kept, and used."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import save_tiny
from decoding_helpers import decode, drafter_of, random_prompts, requests_of, tokens_of

from spectune.decoding import tree_calibration
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree_calibration import CalibratedShapes, fed_sizes, level_sizes, load_or_calibrate, plan
from spectune.decoding.tree_drafter import TreeModelDrafter
from spectune.decoding.tree_measurement import (
    Acceptance,
    StepTimes,
    calibration_requests,
    measure_acceptance,
    measure_times,
)
from spectune.decoding.tree_plans import StaticPlan
from spectune.sweeping.cell import Sampling

HOT = Sampling(temperature=1.0)
KINDS = ["distinct", "iid", "without_replacement"]


@pytest.fixture(scope="module")
def other(tiny, other_folder):
    return drafter_of(tiny, other_folder)


@pytest.fixture(scope="module")
def near(tiny, tmp_path_factory):
    """The target with a little noise: right about as often as not."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("near")
    model = AutoModelForCausalLM.from_pretrained(tiny.model.model.name_or_path)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return drafter_of(tiny, folder)


class Star:
    """Every node of the first level, nothing below."""

    notes = ()

    def __init__(self, width: int) -> None:
        self.width = width

    def parents(self, round_, slots):
        return (0,) * self.width


@pytest.mark.parametrize("siblings", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), HOT, Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2)])
def test_measured_chances_are_those_of_real_rounds(tiny, near, siblings, sampling):
    """The chances sum to the share of rounds in which a tree of one level really is accepted."""
    requests = requests_of(random_prompts(10), 40)
    measured = measure_acceptance(tiny, near, siblings, sampling, requests)
    rule = "match" if siblings == "distinct" and not sampling.greedy else "speculative"
    kind = "iid" if siblings == "distinct" else siblings
    drafter = TreeModelDrafter(near, StaticPlan(Star(3), kind))
    run = decode(
        tiny, drafter, random_prompts(10), k=3, batch=10, max_new_tokens=80, rule=rule, sampling=sampling,
        stop=StopRule(),
    )  # fmt: skip
    rounds = [r for g in run.generations for r in g.rounds if r.drafted]
    really = sum(r.accepted for r in rounds) / len(rounds)
    # Some 400 tokens on either side: two standard errors of 0.025 each, texts that differ included.
    assert sum(measured.ranks[:3]) == pytest.approx(really, abs=0.1)
    assert measured.ranks[0] > 0.2
    assert measured.positions == sum(len(g) for g in _written(tiny, requests, sampling))


def _written(tiny, requests, sampling):
    prompts = [list(r.token_ids) for r in requests]
    return tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=40, batch=10, sampling=sampling))


@pytest.mark.parametrize("siblings", KINDS)
def test_a_draft_equal_to_the_target_is_accepted_at_its_first_child(tiny, tiny_folder, siblings):
    same = drafter_of(tiny, tiny_folder)
    for sampling in (Sampling(), HOT, Sampling(temperature=0.7, repetition_penalty=1.5)):
        if siblings == "distinct" and not sampling.greedy:
            continue
        ranks = measure_acceptance(tiny, same, siblings, sampling).ranks
        assert ranks[0] == pytest.approx(1, abs=1e-4)
        assert sum(ranks) <= 1 + 1e-9


def test_greedy_chances_count_how_often_the_target_goes_on_with_the_rth_likeliest_token(tiny, near):
    from transformers import AutoModelForCausalLM

    prompts = random_prompts(4)
    requests = requests_of(prompts, 20)
    outputs = tokens_of(decode(tiny, None, prompts, k=0, max_new_tokens=20))
    draft = AutoModelForCausalLM.from_pretrained(near.model.model.name_or_path)
    counts, total = torch.zeros(16), 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output])
        with torch.inference_mode():
            best = draft(ids).logits[0, len(prompt) - 1 : -1].topk(16).indices
        counts += (best == torch.tensor(output)[:, None]).sum(0)
        total += len(output)
    measured = measure_acceptance(tiny, near, "distinct", Sampling(), requests)
    assert measured.positions == total
    torch.testing.assert_close(torch.tensor(measured.ranks), counts / total)


def test_a_short_draft_context_and_a_small_vocabulary_limit_what_is_measured(tiny, tmp_path):
    short = drafter_of(tiny, save_tiny(tmp_path / "a", seed=1, max_positions=24))
    requests = requests_of(random_prompts(4, lengths=(10, 30)), 20)
    measured = measure_acceptance(tiny, short, "iid", Sampling(), requests)
    # The first output token is named behind the prompt's last; 24 positions name tokens up to number 24.
    full = [len(g) for g in _written(tiny, requests[::2], Sampling())]
    assert measured.positions == sum(min(n, 15, 20) for n in full)


def test_requests_come_from_the_training_book_or_from_chance(tiny):
    requests = calibration_requests(tiny)
    assert len(requests) >= 8
    assert all(max(r.token_ids) < 128 for r in requests)
    assert requests == calibration_requests(tiny)


def test_times_cover_every_width_up_to_the_verification(tiny, other):
    times = measure_times(tiny.model, other.model, 11, 2)
    assert times.widths == (1, 2, 4, 8, 12)
    assert min(times.draft + times.verify) > 0
    assert min(times.draft[0], times.draft[1]) <= times.draft_seconds(2) <= max(times.draft[:3])


def times_of(draft: float, verify: float) -> StepTimes:
    return StepTimes((1, 64), (draft, draft), (verify, verify))


def test_the_depth_follows_the_price_of_a_level():
    acceptance = Acceptance((0.7, 0.15, 0.05), 300)
    sizes = [level_sizes(plan(acceptance, times_of(draft, 1.0), 12)[0].parents) for draft in (0.0, 0.1, 0.4, 3.0)]
    depths = [len(s) for s in sizes]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 6
    assert depths[-1] == 1
    assert all(sum(s) <= 12 for s in sizes)


def test_a_plan_has_the_least_time_per_token_of_all_depths():
    from spectune.decoding.tree_shapes import SequoiaTable

    acceptance, times = Acceptance((0.5, 0.2, 0.1), 300), StepTimes((1, 4, 16), (0.1, 0.12, 0.3), (1.0, 1.1, 1.5))
    shape, tokens = plan(acceptance, times, 15)
    table = SequoiaTable(acceptance.ranks, 15, 15)
    costs = []
    for depth in range(1, 16):
        widths = fed_sizes(table.shape(15, depth).parents)
        assert widths[0] == 1
        assert len(widths) <= depth
        costs.append((sum(map(times.draft_seconds, widths)) + times.verify_seconds(16)) / table.expected[depth, 15])
    chosen = (sum(map(times.draft_seconds, fed_sizes(shape.parents))) + times.verify_seconds(16)) / tokens
    assert chosen == pytest.approx(min(costs))


def test_sizes_of_levels():
    parents = (0, 0, 1, 1, 2, 4)
    assert level_sizes(parents) == [2, 3, 1]
    assert fed_sizes(parents) == [1, 2, 1]
    assert level_sizes(()) == fed_sizes(()) == []


def test_measurements_are_made_once_and_kept_by_what_they_depend_on(tiny, near, tmp_path, monkeypatch):
    calls = []

    def counted(name):
        real = getattr(tree_calibration, name)

        def measure(*args):
            calls.append(name.removeprefix("measure_"))
            return real(*args)

        monkeypatch.setattr(tree_calibration, name, measure)

    counted("measure_acceptance")
    counted("measure_times")
    requests = requests_of(random_prompts(2), 6)
    usual = {"nodes": 5, "rows": 1, "siblings": "iid", "sampling": HOT, "requests": requests, "folder": tmp_path}

    def calibrate(digest="d", **changes):
        calls.clear()
        calibration = load_or_calibrate(tiny, near, digest, **(usual | changes))
        return calibration, list(calls)

    first, made = calibrate()
    assert made == ["acceptance", "times"]
    assert calibrate() == (first, [])
    assert calibrate(digest="e")[1] == ["acceptance", "times"]
    assert calibrate(sampling=Sampling(temperature=0.5))[1] == ["acceptance"]
    assert calibrate(siblings="without_replacement")[1] == ["acceptance"]
    assert calibrate(requests=requests[:1])[1] == ["acceptance"]
    assert calibrate(nodes=6)[1] == ["times"]
    assert calibrate(rows=2)[1] == ["times"]
    # A damaged file is measured again.
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text()[:20])
    assert calibrate()[1] == ["acceptance", "times"]
    again, made = calibrate()
    assert made == []
    for path in tmp_path.glob("*.json"):
        assert path.stat().st_size == 20 or "key" in json.loads(path.read_text())
    assert again.acceptance == first.acceptance


def test_the_cache_folder_is_the_default(tiny, near, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path))
    requests = requests_of(random_prompts(1), 4)
    load_or_calibrate(tiny, near, "d", nodes=3, rows=1, siblings="iid", sampling=HOT, requests=requests)
    assert len(list((tmp_path / "trees").glob("*.json"))) == 2


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_a_drafter_plans_its_own_tree_and_notes_it(tiny, near, tmp_path, siblings):
    shapes = CalibratedShapes(tiny, near, "d", siblings, folder=tmp_path)
    drafter = TreeModelDrafter(near, StaticPlan(shapes, siblings))
    assert drafter.notes == ()
    prompts = random_prompts(4)
    plain = tokens_of(decode(tiny, None, prompts, k=0))
    run = decode(tiny, drafter, prompts, k=7, batch=3)
    assert tokens_of(run) == plain
    assert max(r.nodes for g in run.generations for r in g.rounds) == 7
    (note,) = drafter.notes
    assert "tree of 7 nodes at batch 3, temperature 0: children accepted by rank 0." in note
    decode(tiny, drafter, prompts, k=4, batch=1, sampling=HOT)
    assert len(drafter.notes) == 2
    assert [c.sampling for c in shapes.calibrations.values()] == [Sampling(), HOT]
    # `match` looks at tokens only, so its children are the likeliest ones and their chances others.
    shapes.prepare(4, 1, "match", HOT)
    assert [key[2] for key in shapes.calibrations] == ["distinct", siblings, "distinct"]
