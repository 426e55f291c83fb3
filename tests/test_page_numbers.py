"""The page's numbers are those of `--json`, its size is bounded, and its figures can be had as files."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from synthetic_run import cell, failed, rounds_of, strict_json, write_run

from spectune.cli.report import report
from spectune.errors import SpectuneError
from spectune.reporting.document import report_document
from spectune.reporting.page import render
from spectune.reporting.summary import summarise
from spectune.reporting.tables import KINDS, value
from spectune.sweeping.cell import EXCERPT_PROMPT, Excerpt, ExcerptPiece, Memory, MemoryPlan, Reading


class Tables(HTMLParser):
    """The tables whose rows are lines of the JSON document."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.inside, self.ours = [], None, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        if tag == "table":
            self.ours = "data-json" in own
        if not self.ours:
            return
        if tag == "table":
            self.tables.append({"path": own["data-json"], "columns": [], "rows": []})
        elif self.tables and "data-field" in own:
            self.tables[-1]["columns"].append((own["data-field"], own["data-kind"]))
        elif tag == "tr" and "data-row" in own:
            self.tables[-1]["rows"].append((int(own["data-row"]), []))
        elif tag in ("td", "th") and self.tables and self.tables[-1]["rows"]:
            self.inside = ""

    def handle_data(self, data):
        if self.inside is not None:
            self.inside += data

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self.inside is not None:
            self.tables[-1]["rows"][-1][1].append(self.inside)
            self.inside = None


def remembered(found):
    plan = MemoryPlan(weight_bytes=10**9, kv_bytes=2 * 10**6, logits_bytes=3000, layer_bytes=4)
    none = Reading(value=None, reason="no GPU")
    return found.model_copy(update={"memory": Memory(plan=plan, predicted_bytes=plan.total_bytes, measured_bytes=none)})


@pytest.fixture
def run(tmp_path):
    cells = [
        remembered(cell(k=k, batch=b, drafter=d, speedup=1.37 / b**0.3 + k / 10, verify=1.1))
        for k in (1, 2, 4)
        for b in (1, 4)
        for d in ("ngram", "draft")
    ]
    return write_run(tmp_path / "run", [*cells, cell(k=3, batch=8, timed=False)], [failed("no memory left", k=16)])


@pytest.fixture
def other(tmp_path):
    return write_run(tmp_path / "other", [cell(k=k, speedup=1.9, dtype="bfloat16") for k in (1, 2, 8)])


def test_every_number_of_every_table_is_that_of_the_json_to_the_printed_digit(run, other, tmp_path, capsys):
    report([run, other], tmp_path / "page.html", as_json=True)
    document = strict_json(capsys.readouterr().out)
    found = Tables((tmp_path / "page.html").read_text())
    seen = {t["path"] for t in found.tables}
    assert seen >= {
        "by_batch", "by_suite_and_batch", "drafts", "cells", "fit.predictions", "fit.curves", "bandwidth", "memory",
        "regret", "failed", "best_schedule.rows", "comparisons.0.pairs",
    }  # fmt: skip
    for t in found.tables:
        rows = value(document, t["path"])
        assert t["rows"]
        for n, texts in t["rows"]:
            wanted = [KINDS[kind](*(value(rows[n], f) for f in fields.split())) for fields, kind in t["columns"]]
            assert texts == wanted, t["path"]


def test_the_rows_of_the_cells_are_all_of_the_json(run):
    page = Tables(render(summarise(run)))
    (first, *_) = [t for t in page.tables if t["path"] == "cells"]
    assert [n for n, _ in first["rows"]] == list(range(13))


def test_bandwidth_is_first_shown_of_the_fastest_cell_of_each_suite_and_batch(run):
    summary = summarise(run)
    document = report_document(summary)
    first, every = [t for t in Tables(render(summary, document)).tables if t["path"] == "bandwidth"]
    shown = [document["bandwidth"][n] for n, _ in first["rows"]]
    best = {(a["batch"], a["best"]["drafter"], a["best"]["k"]) for a in document["by_suite_and_batch"] if a["best"]}
    assert {(row["batch"], row["drafter"], row["k"]) for row in shown} == best
    assert len(shown) == len(best) < len(every["rows"]) == 13


def test_two_runs_show_their_pairs_and_the_cells_without_a_partner(run, other):
    summary = summarise(run)
    text = render(summary, report_document(summary, [summarise(other)]))
    assert "dtype: float32 in A, bfloat16 in B" in text
    assert "1 cell of other without a partner" in text
    assert "11 cells of run without a partner" in text


def test_a_sample_is_shown_with_the_kind_of_each_piece_and_not_by_colour_alone(tmp_path):
    pieces = (ExcerptPiece(text="let ", kind="draft", tokens=2), ExcerptPiece(text="x", kind="correction", tokens=1))
    own = cell().model_copy(update={"excerpt": Excerpt(id="p", prompt="a<b", prompt_cut=True, pieces=pieces, cut=True)})
    text = render(summarise(write_run(tmp_path / "run", [own])))
    assert '<span class="t draft" title="accepted draft, 2 tokens">let </span>' in text
    assert '<span class="t correction" title="correction, 1 token">x</span>' in text
    assert "a&lt;b" in text
    assert '.t.correction::before { content: "["; }' in text


def test_the_page_of_200_cells_with_all_they_can_hold_stays_below_a_megabyte(tmp_path):
    # Prompts and repeats are summed up, so few of them make a page as large as many do.
    pieces = [ExcerptPiece(text=" token", kind=k, tokens=1) for k in ("draft", "correction") for _ in range(32)]
    said = Excerpt(id="p", prompt="w" * EXCERPT_PROMPT, prompt_cut=True, pieces=tuple(pieces), cut=True)
    cells = [
        remembered(
            cell(k=k, batch=b, suite=s, drafter=d, speedup=0.8 + k / 7 / b**0.2, prompts=3, repeats=2, verify=1.2,
                 rounds=rounds_of(*((k, a) for a in range(k + 1))), warnings=(f"below-k: {k} of {b}",)),
        ).model_copy(update={"excerpt": said})
        for s in ("code", "math", "creative", "chat", "edit")
        for d in ("ngram", "draft-135m", "eagle3:head", "medusa:head")
        for k in (1, 2, 4, 6, 8)
        for b in (1, 8)
    ]  # fmt: skip
    text = render(summarise(write_run(tmp_path / "run", cells)))
    assert len(cells) == 200
    assert text.count('class="t correction" title') == 20 * 32
    assert len(text.encode()) < 1_000_000


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_each_figure_can_be_had_as_a_file(run, tmp_path, kind, start):
    report([run], tmp_path / "page.html", tmp_path / "figures", kind)
    files = sorted((tmp_path / "figures").iterdir())
    names = [
        "acceptance-by-position",
        "drafts",
        "predicted-and-measured",
        "speedup-by-batch",
        "speedup-by-k",
        "waterfall",
    ]
    assert [f.name for f in files] == [f"{name}.{kind}" for name in names]
    assert all(f.read_bytes().startswith(start) for f in files)


def test_help_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys\nfrom spectune.cli.app import app\napp(['report', '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'matplotlib', 'jinja2'} & set(sys.modules), 'too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))


def test_figures_cannot_go_where_a_file_is(run, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SpectuneError, match="cannot make the folder"):
        report([run], tmp_path / "page.html", tmp_path / "taken", "svg")
