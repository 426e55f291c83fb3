"""Filters, limits and samples keep the prompts they promise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spectune.errors import UsageError
from spectune.suites import load_suite


def test_categories_keep_only_theirs_in_file_order() -> None:
    suite = load_suite("code", categories=("test", "fix"))
    assert {p.category for p in suite.prompts} == {"fix", "test"}
    assert [p.id for p in suite.prompts] == sorted(p.id for p in suite.prompts)
    assert len(load_suite("code").prompts) > len(suite.prompts) > 0


def test_unknown_category_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no category 'fixx'") as caught:
        load_suite("code", categories=("fix", "fixx"))
    assert caught.value.hint is not None
    assert "did you mean fix? " in caught.value.hint
    assert "write, complete, fix, explain, test, refactor, design" in caught.value.hint


def test_limit_takes_the_first() -> None:
    assert [p.id for p in load_suite("math", limit=3).prompts] == ["math-001", "math-002", "math-003"]


def test_limit_counts_after_the_category_filter() -> None:
    suite = load_suite("math", categories=("proof",), limit=2)
    assert [p.category for p in suite.prompts] == ["proof", "proof"]


def test_more_than_there_are_is_said() -> None:
    suite = load_suite("math", categories=("logic",), limit=50)
    assert len(suite.prompts) == 2
    assert suite.notes == ("50 prompts were asked for, there are 2",)


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(UsageError, match="leaves nothing to measure"):
        load_suite("math", limit=limit)


def test_seed_without_a_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="a sample needs its size"):
        load_suite("math", sample_seed=1)


def test_samples_differ_by_seed_and_keep_the_file_order() -> None:
    samples = {seed: [p.id for p in load_suite("chat", limit=10, sample_seed=seed).prompts] for seed in range(5)}
    assert all(len(ids) == 10 and ids == sorted(ids) for ids in samples.values())
    assert len({tuple(ids) for ids in samples.values()}) == 5
    assert samples[0] != [p.id for p in load_suite("chat", limit=10).prompts]


def test_a_larger_sample_contains_the_smaller_one() -> None:
    small, large = ({p.id for p in load_suite("chat", limit=n, sample_seed=3).prompts} for n in (5, 20))
    assert small < large


def test_samples_do_not_depend_on_hash_randomization() -> None:
    code = "from spectune.suites import load_suite; print(load_suite('edit', limit=7, sample_seed=11).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert digests == {load_suite("edit", limit=7, sample_seed=11).digest + "\n"}


def test_digest_tells_selections_apart() -> None:
    whole = load_suite("chat")
    digests = {
        whole.digest,
        load_suite("chat", limit=5).digest,
        load_suite("chat", limit=5, sample_seed=0).digest,
        load_suite("chat", categories=("advice",)).digest,
    }
    assert len(digests) == 4
    assert load_suite("chat").digest == whole.digest
