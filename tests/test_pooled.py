"""Pooling a grid's costs: what its cells would show on a steady machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic_run import cell

from spectune.speedup.pooled import pooled
from spectune.sweeping.figures import figures

PLAIN = {"code": 0.010, "math": 0.008}
DRAFT = {"quick": 0.04, "slow": 0.3}  # in plain steps
KS, BATCHES = range(1, 13), (1, 4)


def true_round(drafter: str, suite: str, batch: int, k: int) -> float:
    return PLAIN[suite] * (1 + 0.02 * batch * k + DRAFT[drafter] * k)


def timed(rng, noise: float, shared: float, **place):
    """A cell of 160 rounds in which half of the drafts are accepted; both of its times are off by `noise`.

    `shared` is what throws both off alike.
    """
    drafter, suite, batch, k = (place[name] for name in ("drafter", "suite", "batch", "k"))
    made = cell(prompts=8 * batch, repeats=1, noise=0.0, **place)
    plain, round_seconds = PLAIN[suite], true_round(drafter, suite, batch, k)
    spell = math.exp(rng.normal(0, shared)) if shared else 1.0
    wanted = {
        "plain": plain * spell * math.exp(rng.normal(0, noise)),
        "speculative": round_seconds * spell * math.exp(rng.normal(0, noise)),
    }
    passes = []
    for p in made.passes:
        own = [sum(c.count for c in r.rounds) for r in p.requests]
        requests = [
            r.model_copy(update={"full_seconds": n * wanted[p.mode]}) for r, n in zip(p.requests, own, strict=True)
        ]
        times = p.times.model_copy(update={"rounds": sum(own) // batch})
        passes.append(p.model_copy(update={"requests": tuple(requests), "times": times}))
    return made.model_copy(update={"passes": tuple(passes)})


def true_speedup(made) -> float:
    s = made.spec
    return figures(made).acceptance_length * PLAIN[s.suite] / true_round(s.drafter, s.suite, s.batch, s.k)


def grid(noise: float, shared: float = 0.0, seed: int = 7):
    rng = np.random.default_rng(seed)
    return [
        timed(rng, noise, shared, drafter=drafter, suite=suite, batch=batch, k=k)
        for suite in PLAIN
        for batch in BATCHES
        for drafter in DRAFT
        for k in KS
    ]


def off(found: dict[str, float | None], cells) -> float:
    return float(np.sqrt(np.mean([math.log(found[c.key] / true_speedup(c)) ** 2 for c in cells])))


def test_without_noise_pooling_changes_nothing():
    cells = grid(0.0)
    found = pooled(cells)
    assert found is not None
    for c in cells:
        assert found.speedups[c.key] == pytest.approx(figures(c).speedup, rel=1e-6)
    assert found.noise < 1e-6


def test_pooled_costs_lie_nearer_to_the_truth_and_the_noise_is_found():
    cells = grid(0.08)
    found = pooled(cells)
    assert found is not None
    assert off(found.speedups, cells) < 0.5 * off({c.key: figures(c).speedup for c in cells}, cells)
    assert found.noise == pytest.approx(0.08 * math.sqrt(2), rel=0.25)


def test_a_slow_spell_that_both_passes_met_changes_nothing():
    spells = grid(0.02, shared=0.2)
    found = pooled(spells)
    assert found is not None
    assert found.noise == pytest.approx(0.02 * math.sqrt(2), rel=0.25)
    assert off(found.speedups, spells) < 0.02


def test_the_noise_is_not_flattered_by_what_the_curves_take_up():
    found = [pooled(grid(0.05, seed=seed)) for seed in range(12)]
    mean = np.sqrt(np.mean([f.noise**2 for f in found if f is not None]))
    assert mean == pytest.approx(0.05 * math.sqrt(2), rel=0.05)


def test_too_few_cells_are_not_pooled():
    assert pooled(grid(0.05)[:8]) is None
    assert pooled([cell(full=False, k=k) for k in range(1, 30)]) is None
