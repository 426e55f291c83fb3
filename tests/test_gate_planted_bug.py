"""Bugs planted in acceptance, in real sweeps of tiny models: the exact gate must see each of them."""

from __future__ import annotations

import json

import pytest
from conftest import save_tiny
from test_decoder_greedy import with_tokenizer

from spectune.decoding import rules
from spectune.decoding.generation import Generation
from spectune.gating.gate import gate
from spectune.gating.policy import make_policy
from spectune.gating.snapshot import read_snapshot
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.session import run

EXACT = make_policy((), (), None, "exact")
GREEDY: dict[str, object] = {}
SAMPLED: dict[str, object] = {"temperature": 1.0, "rule": "speculative"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Measure a tiny target with an early exit, which is nearly always wrong, and with itself as the draft."""
    folder = tmp_path_factory.mktemp("planted")
    target = with_tokenizer(save_tiny(folder / "target", max_positions=64), 128)
    prompts = folder / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"w{n + 5} w9 w{n}"}) + "\n" for n in range(6)))

    def measured(**changes):
        usual = {
            "target": str(target),
            "drafts": ("early-exit:1", str(target)),
            "suites": (str(prompts),),
            "ks": (3,),
            "max_new_tokens": 16,
            "ignore_eos": True,
            "dtype": "float32",
            "device": "cpu",
            "peak_bandwidth": 100.0,
        }
        where = tmp_path_factory.mktemp("run") / "run"
        run(SweepOptions(**(usual | changes)), output=where)
        return read_snapshot(where)

    return measured


@pytest.fixture(scope="module")
def baselines(sweep):
    return {"greedy": sweep(**GREEDY), "sampled": sweep(**SAMPLED)}


def one_too_many(monkeypatch):
    right = rules._prefix
    monkeypatch.setattr(rules, "_prefix", lambda keep, counts: (right(keep, counts) + 1).minimum(counts))


def one_too_few(monkeypatch):
    right = rules._prefix
    monkeypatch.setattr(rules, "_prefix", lambda keep, counts: (right(keep, counts) - 1).clamp(min=0))


def no_residual(monkeypatch):
    monkeypatch.setattr(rules, "_residual", lambda p, q, accepted, counts, weight: rules._row(p, accepted))


def bonus_is_accepted(monkeypatch):
    right = Generation.add_round

    def counted(self, drafted, accepted, tokens, nodes):
        right(self, drafted, min(accepted + 1, drafted), tokens, nodes)

    monkeypatch.setattr(Generation, "add_round", counted)


def regressions(outcome) -> set[str]:
    return {c.what for c in outcome.checks if c.verdict == "REGRESSION"}


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_the_same_code_passes(sweep, baselines, mode):
    again = sweep(**(GREEDY if mode == "greedy" else SAMPLED))
    assert gate(again, baselines[mode], EXACT).verdict == "PASS"


@pytest.mark.parametrize(
    ("mode", "bug", "seen_by"),
    [
        ("greedy", one_too_many, ("lossless", "outputs")),
        ("greedy", bonus_is_accepted, ("counts_add_up",)),
        ("sampled", one_too_many, ("outputs",)),
        ("sampled", no_residual, ("outputs",)),
        ("sampled", bonus_is_accepted, ("counts_add_up",)),
        ("sampled", one_too_few, ("outputs",)),
    ],
)
def test_a_planted_bug_is_a_regression(sweep, baselines, monkeypatch, mode, bug, seen_by):
    bug(monkeypatch)
    broken = sweep(**(GREEDY if mode == "greedy" else SAMPLED))
    outcome = gate(broken, baselines[mode], EXACT)
    assert outcome.exit_code == 1
    assert set(seen_by) <= regressions(outcome)


def test_a_draft_that_is_accepted_less_is_a_regression_though_outputs_are_the_same(sweep, baselines, monkeypatch):
    """Greedy outputs do not depend on how much is kept, so only the counts can tell."""
    one_too_few(monkeypatch)
    found = regressions(gate(sweep(**GREEDY), baselines["greedy"], EXACT))
    assert {"accepted", "rounds", "acceptance_length", "joint_acceptance"} <= found
    assert not {"outputs", "lossless", "counts_add_up"} & found
