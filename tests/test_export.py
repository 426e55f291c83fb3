"""The exported table: one row per cell, documented columns, nulls that stay nulls."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pytest
from synthetic_run import cell, failed, strict_json, write_run

from spectune.cli.export import export as command
from spectune.errors import SpectuneError, UsageError
from spectune.reporting.summary import summarise
from spectune.sweeping.cell import RoundCount


@pytest.fixture
def run(tmp_path):
    nothing = (RoundCount(drafted=0, accepted=0, count=5),)
    return write_run(
        tmp_path / "run",
        [cell(k=4, warnings=("a, b\nc",)), cell(k=2, rounds=nothing), cell(k=3, identical=False)],
        [failed(k=8)],
    )


def read(path):
    if path.suffix == ".json":
        return pd.DataFrame(strict_json(path.read_text()))
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_every_format_has_a_row_per_cell_with_the_same_numbers(run, tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    command(run, output=path)
    table = read(path).set_index("k")
    assert list(table.index) == [4, 2, 3, 8]
    for row in summarise(run).rows:
        there = table.loc[row["k"]]
        assert there["status"] == "finished"
        for name in (
            "acceptance_length",
            "speedup",
            "speedup_low",
            "plain_tokens_per_second",
            "card_speedup",
        ):
            assert row[name] == pytest.approx(there[name]) if row[name] is not None else pd.isna(there[name])
    assert table.loc[8, "status"] == "failed"
    assert "out of memory" in table.loc[8, "failure"]
    assert pd.isna(table.loc[8, "speedup"])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_value_without_a_definition_is_null_and_not_zero(run, tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    command(run, output=path)
    table = read(path).set_index("k")
    assert pd.isna(table.loc[2, "acceptance_rate"])
    assert table.loc[2, "acceptance_length"] == 1.0
    assert table.loc[2, "joint_acceptance_1"] == 0.0
    assert pd.isna(table.loc[2, "joint_acceptance_3"])
    assert pd.isna(table.loc[2, "conditional_acceptance_1"])
    assert pd.isna(table.loc[4, "dram_utilization"])


def test_a_wrong_result_is_exported_without_a_speed(run, tmp_path):
    command(run, output=tmp_path / "t.json")
    row = next(r for r in strict_json((tmp_path / "t.json").read_text()) if r["k"] == 3)
    assert row["output_check"] == "different"
    assert row["speedup"] is row["speculative_tokens_per_second"] is None
    assert row["repeat_speedups"] == []
    assert "no speed" in row["excluded"]


def test_counts_stay_whole_numbers_in_parquet(run, tmp_path):
    command(run, output=tmp_path / "t.parquet")
    table = read(tmp_path / "t.parquet")
    assert str(table["accepted"].dtype) == "Int64"
    assert set(table["output_check"].dropna()) == {"identical", "different"}
    assert table["joint_acceptance_1"].dtype.kind == "f" or str(table["joint_acceptance_1"].dtype) == "Float64"


def test_every_column_is_documented(run):
    text = (Path(str(files("spectune"))) / "reports" / "README.md").read_text(encoding="utf-8")
    documented = set()
    for line in text.splitlines():
        if line.startswith("|"):
            documented |= set(re.findall(r"\w+", line.split("|")[1]))
    assert set(summarise(run).rows[0]) <= documented


def test_an_unknown_suffix_is_wrong_use_and_a_missing_folder_a_failure(run, tmp_path):
    with pytest.raises(UsageError, match=r"table\.xlsx"):
        command(run, output=tmp_path / "table.xlsx")
    with pytest.raises(SpectuneError, match="cannot write"):
        command(run, output=tmp_path / "no" / "table.csv")
    assert not (tmp_path / "table.xlsx").exists()
