"""Recorded computations, through their twin on the CPU: the same buffers, and nothing that would wait for the host."""

from __future__ import annotations

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import drafter_of, random_prompts, requests_of, tokens_of

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.graphs import Graphs, NoReading, NoSynchronization
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.sweeping.cell import Sampling
from spectune.sweeping.recording import recorded

CPU = torch.device("cpu")
SAMPLINGS = {
    "greedy": (Sampling(), "greedy"),
    "speculative": (Sampling(temperature=0.9), "speculative"),
    "shaped": (Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2), "speculative"),
    "match": (Sampling(temperature=0.9), "match"),
    "typical": (Sampling(temperature=0.9), "typical"),
}
DRAFTERS = ("ngram", "tree:ngram", "self", "tree:self", "specinfer:self", "early-exit:1", "layer-skip:1")
DRAFTERS += ("tree:early-exit:1", "staged:ngram>self", "staged:self>early-exit:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return load_tiny(folder)


def decode(target, drafter, *, graphs: bool, how: str, batch: int = 3, recordings: Graphs | None = None, tokens=18):
    sampling, rule = SAMPLINGS[how]
    settings = DecodeSettings(KSchedule.constant(4), rule, sampling, graphs=graphs)
    decoder = Decoder(target.model, drafter, settings, StopRule(), recordings)
    run = decoder.decode(requests_of(random_prompts(5), tokens), batch)
    return decoder, run


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", [None, *DRAFTERS])
def test_recorded_decoding_gives_the_same_tokens_and_counts_and_never_asks_the_host(target, folder, name, how):
    drafter = None if name is None else drafter_of(target, name.replace("self", str(folder)))
    _, expected = decode(target, drafter, graphs=False, how=how)
    decoder, run = decode(target, drafter, graphs=True, how=how)
    assert decoder.graphs is not None
    assert decoder.graphs.captures > 0
    assert decoder.graphs.unrecorded == {}
    assert tokens_of(run) == tokens_of(expected)
    if name is None or "tree" not in name:  # a tree of fixed size may hold more nodes near a row's limit
        rounds = [[(r.accepted, r.emitted) for r in g.rounds] for g in run.generations]
        assert rounds == [[(r.accepted, r.emitted) for r in g.rounds] for g in expected.generations]


def test_a_second_run_of_the_same_shape_records_nothing_new_and_a_longer_one_all_anew(target, folder):
    drafter = drafter_of(target, str(folder))
    decoder, first = decode(target, drafter, graphs=True, how="greedy")
    graphs = decoder.graphs
    count = graphs.captures
    _, again = decode(target, drafter, graphs=True, how="greedy", recordings=graphs)
    assert tokens_of(again) == tokens_of(first)
    assert graphs.captures == count
    _, longer = decode(target, drafter, graphs=True, how="greedy", recordings=graphs, tokens=60)
    assert graphs.captures > count
    _, expected = decode(target, drafter, graphs=False, how="greedy", tokens=60)
    assert tokens_of(longer) == tokens_of(expected)


def test_room_made_beforehand_spares_the_longer_run_new_recordings(target):
    decoder = Decoder(target.model, None, DecodeSettings(KSchedule.constant(4), "greedy", graphs=True), StopRule())
    decoder.decode(requests_of(random_prompts(3), 4), 3, room=120)
    count = decoder.graphs.captures
    decoder.decode(requests_of(random_prompts(3), 60), 3, room=120)
    assert decoder.graphs.captures == count


def test_outputs_are_cut_to_the_rows_and_live_until_the_next_run():
    graphs = Graphs(CPU, rows=4)
    first = graphs.run("double", lambda given: {"y": 2 * given["x"]}, {"x": torch.tensor([1.0, 2.0])})["y"]
    assert first.tolist() == [2.0, 4.0]
    graphs.run("double", lambda given: {"y": 2 * given["x"]}, {"x": torch.tensor([5.0])})
    assert first[0] == 10.0  # the buffer of the same recording
    assert graphs.captures == 1
    graphs.run("double", lambda given: {"y": 2 * given["x"]}, {"x": torch.ones(2, 3)})
    assert graphs.captures == 2


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).all()),
        lambda x: int(x.sum()),
        lambda x: float(x.sum()),
        lambda x: [0, 1][(x.sum() > 5).long()],
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: 1.0 in x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0]),
    ],
)
@torch.inference_mode()
def test_what_makes_host_and_device_wait_is_refused_and_called_directly(operation):
    """In inference mode, as the decoder runs."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="wait for each other"), NoSynchronization(), NoReading():
        operation(x)
    graphs = Graphs(CPU, rows=3)

    def ask(given):
        operation(given["x"])
        return {"y": given["x"] + 1}

    assert graphs.run("ask", ask, {"x": x})["y"].tolist() == [2.0, 2.0, 2.0]
    assert "wait for each other" in graphs.unrecorded["ask"]


def test_recording_is_for_cuda_unless_somebody_says_otherwise(monkeypatch):
    monkeypatch.delenv("SPECTUNE_GRAPHS", raising=False)
    assert not recorded("cpu")
    assert recorded("cuda:0")
    assert not recorded("cuda:0", wanted=False)
    monkeypatch.setenv("SPECTUNE_GRAPHS", "1")
    assert recorded("cpu")
    assert not recorded("cpu", wanted=False)
    monkeypatch.setenv("SPECTUNE_GRAPHS", "0")
    assert not recorded("cuda:0")


@pytest.mark.parametrize("how", ["greedy", "speculative", "match"])
@pytest.mark.parametrize("name", ["self", "other", "early-exit:1"])
def test_drafting_ahead_is_taken_up_where_all_rows_went_on_and_changes_nothing(target, folder, tmp_path, name, how):
    where = {"self": folder, "other": save_tiny(tmp_path / "other", seed=5)}.get(name, name)
    drafter = drafter_of(target, str(where))
    _, expected = decode(target, drafter, graphs=False, how=how, tokens=30)
    taken = []
    propose = drafter.propose

    def spy(round_):
        draft = propose(round_)
        taken.append(draft is not None and draft.ahead)
        return draft

    drafter.propose = spy
    _, run = decode(target, drafter, graphs=True, how=how, tokens=30)
    assert tokens_of(run) == tokens_of(expected)
    assert sum(taken) > len(taken) // 3
    assert not all(taken)  # where a row ended or began, the draft was made anew
    rounds = [[(r.accepted, r.emitted) for r in g.rounds] for g in run.generations]
    assert rounds == [[(r.accepted, r.emitted) for r in g.rounds] for g in expected.generations]


def test_trees_of_any_depth_share_a_recording(target):
    decoder, _ = decode(target, drafter_of(target, "tree:ngram"), graphs=True, how="greedy", tokens=60)
    assert decoder.graphs.captures <= 2  # with a tree and without


def test_a_draft_made_ahead_for_rows_that_ended_is_not_taken_for_those_that_follow(target, folder):
    """Every round keeps 4 drafted tokens and adds one: 31 tokens end a request just when all was drafted ahead."""
    settings = DecodeSettings(KSchedule.constant(4), "greedy", Sampling(), graphs=True)
    decoder = Decoder(target.model, drafter_of(target, str(folder)), settings, StopRule())
    run = decoder.decode(requests_of(random_prompts(6), 31), 3)
    assert [[r.accepted for r in g.rounds] for g in run.generations] == [[4] * 6] * 6
