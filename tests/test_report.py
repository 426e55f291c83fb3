"""The HTML page: complete, self-contained, and inert whatever is in the run."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from synthetic_run import bandwidth, cell, failed, strict_json, write_run

from spectune.reporting.document import report_document
from spectune.reporting.page import render
from spectune.reporting.summary import as_json, summarise
from spectune.reporting.tuning import advice_lines
from spectune.sweeping.cell import Reading

HOSTILE = """</script><img src=x onerror=alert(1)> 1<2 & "x" 'y' </style></svg>"""
VOID = {"meta", "link", "img", "br", "hr", "input", "col"}


class Page(HTMLParser):
    """Checks nesting, and collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(path):
    return Page(render(summarise(path, allow_empty=True)))


@pytest.fixture
def run(tmp_path):
    cells = [cell(k=k, batch=b, speedup=1.5 / b**0.3, warnings=("a: b; c",)) for k in (1, 2, 4) for b in (1, 4)]
    return write_run(tmp_path / "run", cells, [failed("no memory left", k=16)])


def test_the_page_is_one_file_that_loads_nothing(run):
    text = render(summarise(run))
    page = Page(text)
    assert "://" not in text
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert all(v.startswith("#") for name, v in page.attributes if name in ("href", "xlink:href", "src"))
    assert "prefers-color-scheme: dark" in text
    assert ("role", "img") in page.attributes
    ids = [v for name, v in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_answer_comes_first_and_everything_else_is_there(run):
    page = page_of(run)
    text = page.text
    parts = (
        "The answer",
        "Speedup by K and by batch",
        "Drafts side by side",
        "Acceptance by position and suite",
        "Where the speedup goes",
        "Predicted against measured",
        "Bandwidth",
        "Memory plan",
        "Regret",
        "Failed cells",
        "Environment",
        "Warnings",
        "Every cell",
        "Definitions",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert page.tags.count("figure") == page.tags.count("figcaption") == 6
    assert "oom: no memory left" in text
    assert "a processor" in text
    # Each kind of advice once, in the words of the terminal.
    lines = list(advice_lines(summarise(run).tuning))
    assert lines
    assert all(line in text for line in lines)


def test_the_page_shows_the_numbers_of_the_json(run):
    summary = summarise(run)
    document = strict_json(as_json(report_document(summary)))
    text = Page(render(summary)).text
    found = document["overall"]["speedup"]
    assert f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})" in text
    for row in document["cells"]:
        assert f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" in text
        assert f"{row['acceptance_length']:.2f}" in text
        assert f"{row['speculative_tokens_per_second']:.1f}" in text
    card = f"{found['value']:.2f}× plain decoding, 95 % interval {found['low']:.2f} to {found['high']:.2f}"
    assert card in text
    for reason in document["overall"]["why"]:
        assert reason in text


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    names = {"drafter": HOSTILE, "suite": HOSTILE, "target": HOSTILE}
    run = write_run(
        tmp_path / "hostile",
        [cell(k=k, warnings=(HOSTILE,), **names) for k in (1, 2)],
        [failed(HOSTILE, k=9, **names)],
        name=HOSTILE,
        command=("spectune", HOSTILE),
        environment={HOSTILE: HOSTILE, "nested": {"a": [HOSTILE]}},
    )
    page = page_of(run)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert HOSTILE in page.text
    assert page.text.count("<img src=x onerror=alert(1)>") > 5


def test_readings_that_are_missing_give_their_reason(tmp_path):
    readings = bandwidth(
        dram_utilization=Reading(value=None, reason="this GPU is older than Hopper"),
        mbu_plain=Reading(value=1.25, source="model"),
    )
    run = write_run(tmp_path / "gpu", [cell().model_copy(update={"bandwidth": readings})])
    text = page_of(run).text
    assert "DRAM utilisation n/a: this GPU is older than Hopper" in text
    assert "125% (model)" in text
    assert "1.00 GB/s (copy)" in text


@pytest.mark.parametrize(
    "cells",
    [
        [cell()],
        [cell(timed=False, full=False)],
        [cell(prompts=1)],
        [cell(identical=False)],
        [cell(k=1, drafter="ngram", drafter_digest="", steps=0), cell(k=2, identical=False)],
    ],
    ids=["single", "no times", "one prompt", "wrong", "mixed"],
)
def test_thin_runs_have_a_page_and_strict_json(tmp_path, cells):
    path = write_run(tmp_path / "run", cells)
    summary = summarise(path)
    text = Page(render(summary)).text
    assert "n/a" in text
    assert not re.search(r"\b(nan|inf)\b", text.lower())
    assert strict_json(as_json(report_document(summary)))


def test_a_run_in_which_everything_failed_still_has_a_page(tmp_path):
    path = write_run(tmp_path / "failed", failures=[failed("first", k=1), failed("second", k=2, reason="error")])
    text = page_of(path).text
    assert "No answer" in text
    assert "error: second" in text
    assert strict_json(as_json(report_document(summarise(path, allow_empty=True))))


def test_equal_runs_give_equal_pages(run):
    assert render(summarise(run)) == render(summarise(run))


def command(path, *, setup="", **environment):
    program = f"{setup}\nfrom spectune.cli.app import app\napp(['report', {str(path)!r}], standalone_mode=False)"
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", **environment},
    )


@pytest.mark.parametrize("backend", ["TkAgg", "no-such-backend"])
def test_a_gui_backend_without_a_display_is_no_obstacle(run, backend):
    command(run, MPLBACKEND=backend)
    text = (run / "report.html").read_text()
    assert ("<figure" in text) == (backend == "TkAgg")
    assert ("Figures are left out" in text) == (backend != "TkAgg")


def test_without_matplotlib_the_page_says_that_figures_are_left_out(run):
    command(run, setup="import sys; sys.modules['matplotlib'] = None")
    page = Page((run / "report.html").read_text())
    assert "figure" not in page.tags
    assert "Figures are left out" in page.text
    assert "The answer" in page.text


def test_the_page_can_go_elsewhere(run, tmp_path, monkeypatch, capsys):
    from spectune.cli.report import report

    report([run], tmp_path / "page.html")
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text())
    report([run], tmp_path / "page.html", as_json=True)
    assert strict_json(capsys.readouterr().out)["cells"]


def test_an_answer_that_is_unsure_comes_with_the_sweep_that_would_measure_more(tmp_path):
    words = ("spectune", "sweep", "--draft", "staged:ngram>draft", "--prompts", "4", "-o", "runs/a", "--resume")
    unsure = write_run(tmp_path / "unsure", [cell(speedup=1.0)], command=words)
    text = page_of(unsure).text
    assert "spectune sweep --draft 'staged:ngram>draft' --prompts 8 --repeats 2" in text
    assert "--speculative-algorithm out" in text
    sure = write_run(tmp_path / "sure", [cell(speedup=2.0, noise=0.1)], command=words)
    assert "--prompts 8" not in page_of(sure).text
