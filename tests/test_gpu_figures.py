"""Sections of a benchmark: their seconds, their failures and their table."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from spectune.engines.gpu_figures import Aim, Figure, Section, Skipped, run_section, table


def test_a_section_ends_when_its_seconds_are_over_and_keeps_its_figures():
    def slow():
        yield Figure.of("quick", "s", [1.0])
        try:
            time.sleep(60)
        except Exception:
            pytest.fail("a handler of ordinary errors must not keep a section alive")

    outcome = run_section(Section("slow", 1, slow), 0.2)
    assert outcome.status == "out of time"
    assert outcome.seconds < 30
    assert [f.what for f in outcome.figures] == ["quick"]


def test_the_table_shows_aims_and_why_a_section_has_no_figures():
    def skipped():
        raise Skipped("no GPU")
        yield

    good = run_section(
        Section("a", 5, lambda: iter([Figure.of("x", "ms", [3.0, 1.0, 2.0], Aim(2.5, at_least=False))])), 5
    )
    bad = run_section(Section("b", 5, lambda: iter([Figure.of("y", "", [0.5], Aim(0.8, at_least=True))])), 5)
    console = Console(width=120, record=True, quiet=False)
    console.print(table([good, bad, run_section(Section("c", 5, skipped), 5)]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1:] == [
        ["a", "x", "2", "ms", "1–3", "3", "≤", "2.5", "met"],
        ["b", "y", "0.5", "0.5–0.5", "1", "≥", "0.8", "not", "met"],
        ["c", "skipped:", "no", "GPU"],
    ]


def test_a_section_does_not_start_without_time():
    outcome = run_section(Section("late", 5, lambda: pytest.fail("started")), -1.0)
    assert (outcome.status, outcome.reason) == ("skipped", "no time was left")


@pytest.mark.parametrize(("value", "met"), [(0.79, False), (0.80, True), (0.81, True)])
def test_an_aim_is_held_against_the_median(value, met):
    assert Figure.of("x", "", [0.0, value, 1.0], Aim(0.8, at_least=True)).met is met
    assert Figure.of("x", "", [0.0, value, 1.0], Aim(0.8, at_least=False)).met is (value <= 0.8)
