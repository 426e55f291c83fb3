"""What rounds cost, from probes of a machine whose speed drifts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import cell, probe, spec

from spectune.speedup.shorter import length_at
from spectune.sweeping.cell import RoundCount
from spectune.sweeping.fast_plan import predict
from spectune.sweeping.round_costs import Costs, between, drawn_together, widths


def full(k: int) -> Counter:
    """Rounds that all drafted K tokens."""
    return Counter({(k, 0): 1})


def chain(name: str | None, slow: float, suite: str = "code", error: float = 0.0, rise: float = 0.1, drafting=0.2):
    """Probes at K 0 and 4 while the machine takes `slow` times as long."""
    own = drafting if name else 0.0
    return [probe(name, 1, k, slow * (1 + rise * k), suite, slow * own * k, error=error) for k in (0, 4)]


def test_a_probe_taken_in_a_slow_spell_costs_the_same():
    for slow in (1.0, 1.5, 0.7):
        costs = Costs([*chain(None, 1.0), *chain("small", slow)])
        assert costs.round(spec(drafter="small", k=4), full(4)) == pytest.approx(1.4 + 0.8)
        assert costs.plain(spec(drafter="small", k=4)) == pytest.approx(1.0)


def test_overheads_count_on_both_sides():
    times = [
        probe(None, 1, 0, 2.0, overhead=0.2),
        probe(None, 1, 4, 2.0, overhead=0.9),
        probe("small", 1, 0, 2.0, overhead=0.4),
        probe("small", 1, 4, 2.0, drafting=1.0, overhead=0.6),
    ]
    costs = Costs(times)
    assert costs.plain(spec(drafter="small", k=4)) == pytest.approx(1.1)
    assert costs.round(spec(drafter="small", k=4), full(4)) == pytest.approx(1 + 0.5 + 0.3)
    assert costs.round(spec(drafter="small", k=0), full(0)) == pytest.approx(1 + 0.2)
    cells = [cell(drafter="small", batch=1, k=4, rounds=(RoundCount(drafted=4, accepted=1, count=10),))]
    (found,) = predict([cells[0].spec], cells, times).values()
    assert found.speedup == pytest.approx(2 * 1.1 / 1.8)


def test_a_place_without_a_plain_step_or_a_drafter_without_times_costs_nothing_known():
    costs = Costs([*chain(None, 1.0), *chain("small", 1.0), *chain("other", 1.0)[1:]])
    assert costs.round(spec(drafter="small", k=4, suite="math"), full(4)) is None
    assert costs.plain(spec(drafter="small", k=4, suite="math")) is None
    assert costs.round(spec(drafter="other", k=4), full(4)) is None
    assert costs.round(spec(drafter="small", k=4, batch=2), full(4)) is None


def test_a_verification_stands_for_other_suites_at_its_own_batch():
    times = [p.model_copy(update={"suites": ("math",)}) for p in chain(None, 1.0)] + chain("small", 1.0)
    costs = Costs(times)
    for suite in ("code", "math"):
        assert costs.round(spec(drafter="small", k=4, suite=suite), full(4)) == pytest.approx(1.4 + 0.8)
        assert costs.plain(spec(drafter="small", k=4, suite=suite)) == pytest.approx(1.0)
    assert costs.plain(spec(drafter="small", k=4, suite="chat")) is None
    assert costs.plain(spec(drafter="small", k=4, suite="math", batch=2)) is None


def test_a_drafter_timed_on_a_suite_that_another_stands_for_is_costed():
    times = [p.model_copy(update={"suites": ("math",)}) for p in chain(None, 1.0)] + chain("small", 2.0, suite="math")
    assert Costs(times).round(spec(drafter="small", k=4, suite="code"), full(4)) == pytest.approx(1.4 + 0.8)


def test_short_drafts_are_drafted_and_verified_as_short_ones():
    """At the end of an output there is room for less than K."""
    costs = Costs([*chain(None, 1.0), *chain("small", 1.0)])
    counts = Counter({(4, 0): 3, (2, 0): 1})
    assert costs.round(spec(drafter="small", k=4), counts) == pytest.approx(0.75 * 2.2 + 0.25 * 1.6)


def test_drafts_of_changing_length_are_costed_by_how_long_they_are():
    """Prompt lookup offers nothing in most rounds: they cost a plain step, the others a full verification."""
    grid = tuple(spec(drafter="ngram", batch=b, k=k) for b in (1, 4) for k in (4, 8))
    counts = (
        RoundCount(drafted=0, accepted=0, count=80),
        RoundCount(drafted=8, accepted=0, count=10),
        RoundCount(drafted=8, accepted=8, count=10),
    )
    survey_cell = cell(drafter="ngram", batch=1, k=8, rounds=counts)
    times = [probe(None, b, k, b * (1 + k / 2)) for b in (1, 4) for k in (0, 4, 8)]
    times += [probe("ngram", b, k, b, drafting=b * 0.25, drafted=1.0) for b in (1, 4) for k in (0, 4, 8)]
    costs = Costs(times)
    known = Counter({(c.drafted, c.accepted): c.count for c in counts})
    assert costs.round(grid[1], known) == pytest.approx(0.25 + 0.8 * 1.0 + 0.2 * 5.0)
    # Of four rows one drafts in 1 - 0.8**4 of the rounds, and all are as wide as it.
    assert costs.round(grid[3], known) == pytest.approx(0.25 + 0.8**4 * 1.0 + (1 - 0.8**4) * 5.0)
    # At K = 4 the ten long runs take 9/5 rounds each.
    wide = (10 + 18) / (80 + 10 + 18)
    assert costs.round(grid[0], known) == pytest.approx(0.25 + (1 - wide) * 1.0 + wide * 3.0)
    found = predict(grid, [survey_cell], times)
    assert found[grid[1].key].acceptance_length == pytest.approx(180 / 100) == length_at(known, 8)
    assert found[grid[1].key].speedup == pytest.approx(1.8 * 1.0 / 2.05)


def test_a_drafter_is_verified_in_its_own_way_and_elsewhere_as_much_more_as_bare_tokens():
    for name in ("tree:good", "good"):
        there, here = (spec(drafter=name, suite=s, k=4) for s in ("code", "math"))
        times = [
            *(probe(None, 1, k, 2.0 + k / 4, "code") for k in (0, 4)),
            *(probe(None, 1, k, 1.0 + k / 8 + k / 16, "math") for k in (0, 4)),
            *(probe(name, 1, k, 2.0 + k / 2, drafting=k / 4) for k in (0, 4)),
        ]
        costs = Costs(times)
        assert costs.round(there, full(4)) == pytest.approx(2.0 + 0.5)
        assert costs.round(here, full(4)) == pytest.approx(2.0 + 0.5 + 0.25)
        assert costs.round(spec(drafter=name, suite="other", k=4), full(4)) is None


def test_noisy_probes_of_one_verification_are_averaged_and_steady_ones_keep_what_they_found():
    rises = {"a": 0.08, "b": 0.10, "c": 0.12}
    for error, expected in ((0.2, dict.fromkeys(rises, 0.10)), (1e-4, rises)):
        times = [
            *chain(None, 1.0, error=error),
            *(p for n, r in rises.items() for p in chain(n, 1.0, rise=r, error=error)),
        ]
        costs = Costs(times)
        for name, rise in expected.items():
            cost = costs.round(spec(drafter=name, k=4), full(4))
            assert cost == pytest.approx(1 + 4 * rise + 0.8, rel=2e-3)


def test_verifications_of_different_batches_are_different_ones():
    times = [*chain(None, 1.0, error=0.2), *chain("small", 1.0, error=0.2)]
    large = [p.model_copy(update={"batch": 8, "verify_seconds": 3.0 * p.verify_seconds if p.k else 1.0}) for p in times]
    found = [Costs([*times, *large]).round(spec(drafter="small", k=4, batch=b), full(4)) for b in (1, 8)]
    assert found == [pytest.approx(1.4 + 0.8), pytest.approx(4.2 + 0.8)]


def test_what_does_not_fill_k_and_trees_say_nothing_of_other_verifications():
    times = [*chain(None, 1.0, error=0.2), *chain("small", 1.0, error=0.2)]
    odd = [
        *(probe("ngram", 1, k, 1.0, drafted=min(k, 1.0), error=0.2) for k in (0, 4)),
        *chain("tree:small", 1.0, rise=9.0, error=0.2),
    ]
    place = spec(drafter="small", k=4)
    assert Costs([*times, *odd]).round(place, full(4)) == pytest.approx(Costs(times).round(place, full(4)))


def test_drawing_together_beats_both_each_alone_and_their_mean():
    generator = np.random.default_rng(0)
    alone = mean = together = 0.0
    for _ in range(500):
        true = generator.normal(0.0, 0.05, 8)
        noise = np.full(8, 0.05)
        seen = true + generator.normal(0.0, noise)
        alone += np.sum((seen - true) ** 2)
        mean += np.sum((seen.mean() - true) ** 2)
        together += np.sum((drawn_together(seen, noise**2) - true) ** 2)
    assert together < 0.85 * alone
    assert together < 0.85 * mean


def test_what_is_known_better_counts_for_more():
    values, variances = np.array([0.0, 0.3, 0.3]), np.array([1e-4, 1.0, 1.0])
    assert drawn_together(values, variances) == pytest.approx([0.0, 0.0, 0.0], abs=1e-3)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(1e-8, 1.0)), min_size=1, max_size=8))
def test_what_is_drawn_together_stays_between_the_extremes_and_in_order_of_equals(pairs):
    values, variances = (np.array(column) for column in zip(*pairs, strict=True))
    found = drawn_together(values, variances)
    assert np.all(found >= values.min() - 1e-9)
    assert np.all(found <= values.max() + 1e-9)
    same = drawn_together(values, np.full(len(values), variances[0]))
    assert np.all(np.diff(same[np.argsort(values, kind="stable")]) >= -1e-9)


def test_a_single_place_keeps_its_value():
    assert drawn_together(np.array([0.3]), np.array([0.01])) == pytest.approx([0.3])


@given(
    st.dictionaries(st.tuples(st.integers(0, 8), st.just(0)), st.integers(1, 50), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 16),
)
def test_the_shares_of_widths_add_up_to_one_and_more_rows_are_wider(counts, k, rows):
    one, many = widths(Counter(counts), k, 1), widths(Counter(counts), k, rows)
    assert sum(many.values()) == pytest.approx(1.0)
    assert sum(w * s for w, s in many.items()) >= sum(w * s for w, s in one.items()) - 1e-9


def test_between_interpolates_and_does_not_go_beyond():
    points = {1: 10.0, 3: 20.0, 7: 0.0}
    assert [between(points, x) for x in (0, 1, 2, 3, 5, 7, 9)] == [10.0, 10.0, 15.0, 20.0, 10.0, 0.0, 0.0]
