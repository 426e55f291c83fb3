"""Whatever is wrong with a file of prompts, the error names the file, the line and the remedy."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.suites import Message, Prompt, Suite, load_suite
from spectune.suites.row import to_fields

OK = '{"prompt": "fine"}\n'


def refuse(path: Path | str, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_suite(path, **options)
    return caught.value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f.jsonl: no usable prompt"),
        (b"\n\r\n\n", "f.jsonl: no usable prompt"),
        (b"\xef\xbb\xbf", "f.jsonl: no usable prompt"),
        (b"[]", "f.jsonl: no usable prompt"),
        (OK.encode() * 2 + b'{"prompt": "trunc', "f.jsonl:3: not valid JSON"),
        (OK.encode() + b'{"prompt": "a"', "f.jsonl:2: not valid JSON"),
        (OK.encode() + b"[1, 2]\n", "f.jsonl:2: a row must be a JSON object, not a list"),
        (b'"hello"\n', "f.jsonl:1: a row must be a JSON object, not a string"),
        (b'{"prompt": "a"} {"prompt": "b"}\n', "f.jsonl:1: text after the end of the JSON object"),
        (b'{"id": "a", "n": 1}\n', "f.jsonl:1: no prompt in this row; its fields are: id, n"),
        (b"{}\n", "f.jsonl:1: no prompt in this row; its fields are: (none)"),
        (b'{"prompt": ""}\n', "f.jsonl:1: `prompt` is empty"),
        (b'{"prompt": " \\n"}\n', "f.jsonl:1: `prompt` is empty"),
        (b'{"prompt": null}\n', "f.jsonl:1: no prompt in this row"),
        (b'{"prompt": 5}\n', "f.jsonl:1: `prompt` must be a string, not a number"),
        (b'{"prompt": {"a": 1}}\n', "f.jsonl:1: `prompt` must be a string, not an object"),
        (b'{"question": ["a"]}\n', "f.jsonl:1: `question` must be a string, not a list"),
        (b'{"turns": []}\n', "f.jsonl:1: `turns` must be a non-empty list"),
        (b'{"turns": "a"}\n', "f.jsonl:1: `turns` must be a non-empty list, not a string"),
        (b'{"turns": [1]}\n', "f.jsonl:1: `turns[0]` must be a string"),
        (b'{"messages": []}\n', "f.jsonl:1: `messages` must be a non-empty list"),
        (b'{"messages": ["a"]}\n', "f.jsonl:1: `messages[0]` must be an object"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}\n', "f.jsonl:1: `messages[0].role` is 'tool'"),
        (b'{"messages": [{"content": "a"}]}\n', "f.jsonl:1: `messages[0].role` is None"),
        (b'{"messages": [{"role": "user"}]}\n', "`messages[0].content` must be a string, not null"),
        (b'{"messages": [{"role": "user", "content": ""}]}\n', "`messages[0].content` is empty"),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}]}\n',
            "f.jsonl:1: `messages` has no user message",
        ),
        (
            b'{"messages": [{"role": "system", "content": "a"}]}\n',
            "f.jsonl:1: `messages` has no user message",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n',
            "`messages[0].content` holds a part that is not text",
        ),
        (b'{"conversations": "a"}\n', "f.jsonl:1: `conversations` must be a list of objects"),
        (
            b'{"prompt": "a", "max_new_tokens": 0}\n',
            "f.jsonl:1: `max_new_tokens` is 0; it must be at least 1",
        ),
        (b'{"prompt": "a", "max_tokens": -1}\n', "f.jsonl:1: `max_tokens` is -1"),
        (
            b'{"prompt": "a", "output_tokens": true}\n',
            "`output_tokens` must be a whole number, not true/false",
        ),
        (b'{"prompt": "a", "max_tokens": 1.5}\n', "`max_tokens` must be a whole number"),
        (b'{"prompt": "a", "max_tokens": "9"}\n', "`max_tokens` must be a whole number, not a string"),
        (b'{"prompt": "a", "id": ""}\n', "f.jsonl:1: `id` is empty"),
        (b'{"prompt": "a", "id": 1.5}\n', "f.jsonl:1: `id` must be a string or a whole number"),
        (b'{"prompt": "a", "id": false}\n', "f.jsonl:1: `id` must be a string or a whole number"),
        (b'{"prompt": "a", "category": 3}\n', "f.jsonl:1: `category` must be a string"),
        (b'{"prompt": "a", "n": NaN}\n', "f.jsonl:1: not valid JSON: NaN"),
        (b'{"prompt": "a", "n": -Infinity}\n', "f.jsonl:1: not valid JSON: -Infinity"),
        (b'{"prompt": "a\\ud800"}\n', "f.jsonl:1: a lone surrogate"),
        (b'{"prompt": "a", "id": "\\udfff"}\n', "f.jsonl:1: a lone surrogate"),
        (OK.encode() + b'{"prompt": "caf\xe9"}\n', "f.jsonl:2: not UTF-8 text"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "f.jsonl:1: not UTF-8 text"),
        (b'{"n": ' + b"1" * 5000 + b"}\n", "f.jsonl:1: not valid JSON"),
        (b'{"n": ' + b"[" * 100_000 + b"\n", "f.jsonl:1: not valid JSON"),
        (b'[{"prompt": "a"},\n\n{"prompt": ""}]', "f.jsonl:3: `prompt` is empty"),
        (b'[{"prompt": "a"},\n 7]', "f.jsonl:2: a row must be a JSON object, not a number"),
        (b'[{"prompt": "a"}\n {"prompt": "b"}]', "f.jsonl:2: expected a comma or the end of the array"),
        (b'[{"prompt": "a"},\n{"prompt": \n"b]', "f.jsonl:3: not valid JSON"),
        (b'[{"prompt": "a"}', "f.jsonl:1: expected a comma or the end of the array"),
        (b'[{"prompt": "a"}]\n{"prompt": "b"}', "f.jsonl:2: text after the end of the array"),
        (b"[", "f.jsonl:1: not valid JSON"),
    ],
)
def test_wrong_content_is_refused_with_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(data)
    assert message in refuse(path).message


def test_bom_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "a\\r\\nb"}\r\n\r\n  \r\n{"prompt": "c"}')
    suite = load_suite(path)
    assert [(p.id, p.text) for p in suite.prompts] == [("f-2", "a\r\nb"), ("f-5", "c")]
    assert suite.notes == ()


def test_unicode_line_separators_inside_a_string_do_not_end_the_row(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n{"prompt": "d"}\n')
    assert [p.text for p in load_suite(path).prompts] == ["a\u2028b\u0085c", "d"]


def test_a_prompt_of_ten_thousand_words_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"prompt": "word " * 10_000}))
    assert len((load_suite(path).prompts[0].text or "").split()) == 10_000


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n\n{"id": "1", "prompt": "b"}\n')
    assert "f.jsonl:3: the id '1' is already used on line 1" in refuse(path).message


def test_a_made_id_does_not_hide_behind_a_given_one(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"id": "f-2", "prompt": "a"}\n{"prompt": "b"}\n')
    assert "f.jsonl:2: the id 'f-2' is already used on line 1" in refuse(path).message


class TestPaths:
    def test_unknown_name_lists_the_suites_and_the_closest(self) -> None:
        error = refuse("cods")
        assert error.message == "no suite 'cods'"
        assert "did you mean code? " in (error.hint or "")
        assert "chat, code, creative, edit, extract, math, summarize, human-eval" in (error.hint or "")

    def test_missing_file(self, tmp_path: Path) -> None:
        assert "none.jsonl: no such file" in refuse(tmp_path / "none.jsonl").message

    @pytest.mark.parametrize("name", ["", "a\0b.jsonl", "x" * 5000, "x" * 5000 + ".jsonl"])
    def test_impossible_names(self, name: str) -> None:
        assert re.search("no suite|no such file", refuse(name).message)

    def test_directory(self, tmp_path: Path) -> None:
        assert "is a directory" in refuse(tmp_path).message

    def test_unknown_suffix_lists_the_known_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("x")
        error = refuse(path)
        assert "unknown file type '.yaml'" in error.message
        assert ".parquet" in (error.hint or "")

    def test_unreadable_gzip(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl.gz"
        for data in (b"plain", gzip.compress(OK.encode() * 99)[:-9], gzip.compress(b"x")[:12] + b"\xff" * 30):
            path.write_bytes(data)
            assert "a.jsonl.gz: not a readable gzip file" in refuse(path).message

    def test_column_of_a_text_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("hi\n")
        assert "a .txt file has no columns" in refuse(path, column="prompt").message

    def test_a_bundled_name_wins_over_a_file_and_a_path_reaches_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("code").mkdir()
        Path("code.jsonl").write_text(OK)
        assert load_suite("code").source == "bundled"
        assert load_suite("./code.jsonl").source == "./code.jsonl"
        assert refuse("./code").message == "./code: is a directory"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "human", "gpt", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "id", "question_id", "task_id", "category", "messages", "turns", "conversations", "prompt", "question",
    "answer", "problem", "text", "instruction", "input", "test_list", "entry_point", "max_tokens", "other",
)  # fmt: skip
rows = st.lists(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5) | json_values, max_size=4)


def attempt(name: str, data: bytes, **options: Any) -> Suite | UsageError:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            return load_suite(path, **options)
        except UsageError as error:
            return error


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from([None, "prompt", "messages", "other"]), st.booleans())
def test_any_json_gives_a_suite_or_a_usage_error(data: list[Any], column: str | None, array: bool) -> None:
    text = json.dumps(data) if array else "\n".join(json.dumps(row) for row in data)
    got = attempt("f.jsonl", text.encode(), column=column)
    if isinstance(got, Suite):
        assert got.prompts
        assert len({p.id for p in got.prompts}) == len(got.prompts)
        assert len(got.digest) == 16
    else:
        assert "f.jsonl" in got.message


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60) | st.text('[]{}":,\\ \n\ruprompt1', max_size=40).map(str.encode),
    st.sampled_from(["f.jsonl", "f.csv", "f.txt", "f.jsonl.gz"]),
)
def test_any_bytes_give_a_suite_or_a_usage_error(data: bytes, name: str) -> None:
    got = attempt(name, data)
    assert got.prompts if isinstance(got, Suite) else name in got.message


filled = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
messages = st.builds(
    lambda head, body: (*head, Message("user", body)),
    st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), filled), max_size=3),
    filled,
)
lengths = st.none() | st.integers(1, 10**6)
names = filled.map(str.strip)
prompts = st.builds(Prompt, id=filled, category=names, messages=messages, max_new_tokens=lengths) | st.builds(
    Prompt, id=filled, category=names, text=filled, max_new_tokens=lengths
)


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=5, unique_by=lambda p: p.id), st.booleans())
def test_our_rows_come_back_as_they_were_written(written: list[Prompt], ascii_only: bool) -> None:
    text = "\n".join(json.dumps(to_fields(p), ensure_ascii=ascii_only) for p in written)
    got = attempt("f.jsonl", text.encode())
    assert isinstance(got, Suite)
    assert got.prompts == tuple(written)
