"""The table of methods: one row per drafter, K and suite, with the figures of the run."""

from __future__ import annotations

import json

import pytest
from synthetic_run import cell, rounds_of

from spectune.reporting.methods import curve_table, staged_table, table, training_table
from spectune.speedup.profile import profile


def test_a_row_holds_the_counts_of_the_smallest_batch_and_the_speedups_of_all():
    rounds = rounds_of((4, 4), (4, 0))
    found = [profile(cell(drafter="eagle3:demo", batch=b, speedup=s, rounds=rounds)) for b, s in ((4, 1.25), (1, 1.75))]
    head, _, row = table(found).splitlines()
    cells = [text.strip() for text in row.strip("|").split("|")]
    assert "speedup, batch 1" in head
    assert "speedup, batch 4" in head
    assert cells[:4] == ["`eagle3:demo`", "4", "code", "3.00"]
    assert cells[4] == "0.50, 0.50, 0.50, 0.50"
    assert cells[6].startswith("1.7")
    assert cells[7].startswith("1.2")


def test_a_cell_that_is_not_there_is_a_dash_and_a_bar_in_a_name_is_escaped():
    found = [profile(cell(drafter="a|b", batch=1)), profile(cell(drafter="c", batch=4))]
    rows = table(found).splitlines()[2:]
    assert "a\\|b" in rows[0]
    assert rows[0].endswith("| — |")


def test_the_making_of_a_head_is_told_from_its_file(tmp_path):
    made = {
        "tokens_seen": 12345,
        "command": ["spectune", "train", "eagle3", "-o", "x"],
        "held_out": {"acceptance": [0.5, 0.25], "overlap": [0.4, 0.2]},
    }
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "training.json").write_text(json.dumps(made))
    row = training_table([tmp_path / "eagle3"]).splitlines()[2]
    assert "`eagle3`" in row
    assert "12,345" in row
    assert "0.50, 0.25" in row
    assert "`spectune train eagle3 -o x`" in row


def test_a_head_that_went_on_from_another_tells_of_both_trainings(tmp_path):
    first = {
        "tokens_seen": 1000,
        "command": ["spectune", "train", "eagle3", "-o", "first"],
        "held_out": {"acceptance": [0.1], "overlap": [0.1]},
        "curve": [{"tokens": 1000, "acceptance": [0.125]}],
    }
    made = {
        "tokens_seen": 500,
        "command": ["spectune", "train", "eagle3", "--start", "first"],
        "start": first,
        "held_out": {"acceptance": [0.5], "overlap": [0.25]},
        "curve": [{"tokens": 500, "acceptance": [0.5]}],
    }
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "training.json").write_text(json.dumps(made))
    row = training_table([tmp_path / "eagle3"]).splitlines()[2]
    assert "| 1,000 + 500 | 0.50 | 0.25 |" in row
    assert "`spectune train eagle3 -o first`, then `spectune train eagle3 --start first`" in row
    assert "1,000: 0.12; then, on its own text, 500: 0.50" in curve_table([tmp_path / "eagle3"])


def test_a_staged_drafter_stands_beside_its_second_stage_alone_with_the_reason():
    rounds = rounds_of((4, 4), (4, 0))
    slow = cell(drafter="staged:ngram>small", speedup=0.9, rounds=rounds, cost_ratio=0.5)
    found = [profile(slow), profile(cell(drafter="small", speedup=1.2, rounds=rounds, cost_ratio=0.05))]
    rows = staged_table(found).splitlines()
    assert len(rows) == 3
    assert "`staged:ngram>small`" in rows[2]
    assert "seldom kept" in rows[2]
    cells = [text.strip() for text in rows[2].strip("|").split("|")]
    assert cells[1:7] == ["code", "1", "3.00", "3.00", "4.00", "4.00"]
    assert float(cells[7]) == pytest.approx(10 * float(cells[8]))  # ms of drafting: staged, then alone
    assert (cells[9][:3], cells[10][:3]) == ("0.9", "1.2")
    longer = cell(drafter="staged:ngram>small", rounds=rounds_of((4, 4), (4, 4)), cost_ratio=0.05)
    row = staged_table([profile(longer), found[1]]).splitlines()[2]
    assert "+67% tokens a round" in row
    assert "| 5.00 | 3.00 |" in row
    assert staged_table(found[1:]) == ""


def test_the_curve_of_a_head_names_the_tokens_seen(tmp_path):
    (tmp_path / "eagle").mkdir()
    made = {"curve": [{"tokens": 1000, "acceptance": [0.1, 0.2]}, {"tokens": 20000, "acceptance": [0.3, 0.2]}]}
    (tmp_path / "eagle" / "training.json").write_text(json.dumps(made))
    assert "1,000: 0.10, 20,000: 0.30" in curve_table([tmp_path / "eagle"])  # one point per look at held-out text
