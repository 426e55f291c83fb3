"""Sampled acceptance against 1 − TV of the distributions themselves."""

from __future__ import annotations

import pytest
import torch
from conftest import save_tiny
from synthetic_run import cell, write_run
from test_decoder_greedy import with_tokenizer
from test_native_engine import spec_of, suite_of

from spectune.decoding import rules
from spectune.engines.native import NativeEngine
from spectune.engines.overlap import OverlapCounter
from spectune.reporting.summary import fit_document, summarise
from spectune.reporting.terminal import print_fit
from spectune.speedup.overlap import overlap_check
from spectune.speedup.profile import profile
from spectune.sweeping.cell import OverlapCount, Sampling

NAMES = tuple(f"p{i}" for i in range(8))
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(save_tiny(tmp_path_factory.mktemp("overlap"), initializer_range=0.1), 128)


@pytest.fixture(scope="module")
def engine(folder):
    return NativeEngine(str(folder), dtype="float32", device="cpu")


def overlaps(engine, **changes):
    spec = spec_of(engine, **({"rule": "speculative", "sampling": WARM, "k": 4, "max_new_tokens": 64} | changes))
    return engine.overlap(spec, engine.render(spec, suite_of(*NAMES)).requests)


def check(counts):
    return overlap_check(cell().model_copy(update={"overlap": counts}))


@pytest.mark.parametrize("drafter", ["early-exit:1", "ngram"])
def test_what_is_kept_is_the_overlap_of_the_distributions_within_chance(engine, drafter):
    found = check(overlaps(engine, drafter=drafter))
    assert found.agrees is (True if drafter == "early-exit:1" else None)  # n-grams are hardly ever kept here
    assert found.counted == pytest.approx(found.overlap, abs=0.1)
    assert found.tokens > 20


def test_the_target_as_its_own_draft_overlaps_fully(engine, folder):
    found = check(overlaps(engine, drafter=str(folder)))
    assert (found.counted, found.overlap) == (1.0, pytest.approx(1.0, abs=1e-4))


def test_a_rule_that_keeps_too_much_is_noticed(engine, monkeypatch):
    def generous(tokens, counts, p, q, coins):
        right = speculative(tokens, counts, p, q, coins)
        return rules.Verdict(torch.maximum(right.accepted, counts.clamp(max=1)), right.token)

    speculative = rules.speculative
    monkeypatch.setattr(rules, "speculative", generous)
    found = check(overlaps(engine))
    assert found.agrees is False
    assert found.deviations > 4


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "greedy", "sampling": Sampling()},
        {"rule": "speculative", "sampling": Sampling()},
        {"rule": "match"},
        {"rule": "block"},
        {"drafter": "tree:ngram"},
    ],
)
def test_where_the_overlap_does_not_decide_acceptance_there_is_none(engine, changes):
    assert overlaps(engine, **changes) == ()


def test_only_tokens_that_came_up_for_acceptance_are_summed():
    p = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [1.0, 0.0]]])  # [B = 1, K + 1 = 3, V = 2]
    q = torch.tensor([[[0.4, 0.6], [1.0, 0.0]]])
    counter = OverlapCounter(3)
    counter.add(p, q, torch.tensor([2]), torch.tensor([0]))  # the second never came up
    counter.add(p, q, torch.tensor([2]), torch.tensor([1]))
    counter.add(p, q, torch.tensor([1]), torch.tensor([1]))  # and here it was not drafted
    first, second = counter.counts()
    assert (first.reached, first.accepted, first.overlap) == (3, 2, pytest.approx(2.4))
    assert (second.reached, second.accepted, second.overlap) == (1, 0, pytest.approx(0.5))
    assert first.variance == pytest.approx(3 * 0.8 * 0.2)


def counted(accepted):
    return (OverlapCount(position=1, reached=1000, accepted=accepted, overlap=800.0, variance=160.0),)


def test_a_difference_beyond_chance_is_a_warning_of_the_cell():
    good, bad = (profile(cell().model_copy(update={"overlap": counted(n)})) for n in (810, 900))
    assert not any(note.startswith("overlap") for note in good.notes)
    assert any(note.startswith("overlap: 90.0% of 1000 drafted tokens") for note in bad.notes)
    assert overlap_check(cell()) is None
    certain = OverlapCount(position=1, reached=9, accepted=9, overlap=9.0, variance=0.0)
    assert check((certain,)).agrees is None
    one_surprise = OverlapCount(position=1, reached=1, accepted=0, overlap=0.999, variance=0.001)
    assert check((one_surprise,)).agrees is None  # 30 standard deviations, which say nothing for one token


def test_fit_shows_both_numbers(tmp_path, capsys):
    made = cell(rule="speculative", sampling=WARM, identical=None).model_copy(update={"overlap": counted(810)})
    summary = summarise(write_run(tmp_path / "run", [made]))
    shown = fit_document(summary)["predictions"][0]["overlap"]
    assert (shown["counted"], shown["overlap"], shown["agrees"]) == (0.81, 0.8, True)
    print_fit(summary, everything=True)
    out = capsys.readouterr().out
    assert "81.0%" in out
    assert "80.0%" in out
