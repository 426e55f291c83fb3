"""What a sweep says while it runs, and how long it thinks it will take."""

from __future__ import annotations

import io
import json

import pytest
from fake_engine import FakeEngine

from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping import session
from spectune.sweeping.estimate import TimeLeft, planned_tokens
from spectune.sweeping.listener import Silent
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.progress import Bar, Lines, duration, make_listener
from spectune.sweeping.session import prepare, run
from spectune.sweeping.summary import as_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "fingerprint", lambda device: {"device": device})
    suite = tmp_path / "mine.jsonl"
    suite.write_text("".join(json.dumps({"id": f"p{n}", "prompt": "x"}) + "\n" for n in range(2)))
    options = SweepOptions(suites=(str(suite),), ks=(1, 2, 3), drafts=("[red]",), peak_bandwidth=1.0)

    def start(listener, engine=None):
        return run(options, engine=engine or FakeEngine(), output=tmp_path / "r", listener=listener)

    return start


def fail_second(spec):
    return ValueError("[bold]no[/bold]") if spec.k == 2 else None


def test_lines_have_one_line_per_cell_with_the_time_left(sweep):
    stream = io.StringIO()
    outcome = sweep(make_listener(quiet=False, stream=stream), FakeEngine(failures=fail_second))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("[")]
    assert [line[:5] for line in lines] == ["[1/3]", "[2/3]", "[3/3]"]
    assert "left)" in lines[0]
    assert "left)" not in lines[2]
    assert "failed (error): ValueError" in lines[1]
    assert outcome.failures


def test_a_bar_shows_names_with_brackets_as_they_are(sweep):
    stream = Terminal()
    listener = make_listener(quiet=False, stream=stream)
    assert isinstance(listener, Bar)
    outcome = sweep(listener, FakeEngine(failures=fail_second))
    text = stream.getvalue()
    assert "[red], K 1: " in text
    assert "[bold]no[/bold]" in text
    assert "3/3" in text
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160)
    console.print(as_table(outcome))
    table = console.file.getvalue()
    assert "[red]" in table
    assert "failed: error" in table


def test_the_kind_of_listener_follows_the_stream():
    assert isinstance(make_listener(quiet=True), Silent)
    assert type(make_listener(quiet=False, stream=io.StringIO())) is Lines


def test_time_left_follows_the_pace_of_each_batch():
    suite = Suite("s", "test", (Prompt("a", "x", text="x", max_new_tokens=10), Prompt("b", "x", text="y")))
    options = SweepOptions(batches=(1, 4), ks=(1, 2), max_new_tokens=30, peak_bandwidth=1.0)
    plan = prepare(options, FakeEngine(), [suite]).plan
    one, _, four, _ = plan
    assert planned_tokens(one, suite) == 2 * (10 + 30)
    assert planned_tokens(four, suite) == 2 * 2 * (10 + 30)  # two prompts, four slots: each runs twice
    left = TimeLeft({"s": suite})
    assert left.seconds(plan) is None
    left.record(one, 8.0)
    assert left.seconds(plan[1:]) == pytest.approx(8 + 2 * 16)  # no pace for batch 4 yet: that of batch 1
    left.record(four, 4.0)
    assert left.seconds([plan[1], plan[3]]) == pytest.approx(8 + 4)
    assert left.seconds([]) == 0


@pytest.mark.parametrize(("seconds", "text"), [(3.2, "3 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text
