"""`spectune gate` and `spectune baseline` from the outside: exit codes, one-line errors, and every output."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from gate_helpers import timed_cell, with_requests
from rich.console import Console
from synthetic_run import failed, spec, strict_json, write_run

from spectune.gating.annotations import annotation_lines
from spectune.gating.baseline import read_baseline
from spectune.gating.check import Check, Outcome
from spectune.gating.junit import junit
from spectune.gating.markdown import STEP_SUMMARY_BYTES, append_step_summary, markdown
from spectune.gating.openmetrics import openmetrics
from spectune.gating.terminal import print_outcome

NASTY = 'a|b<script>`*%\r\n::error::x,\x07"\\'


@pytest.fixture
def runs(tmp_path, spectune):
    """Three runs, good, the same again, and slow with worse acceptance; and the baseline of the first."""
    good = timed_cell(2.0)
    worse = timed_cell(1.8, rounds=None)  # and two thirds of the tokens
    worse = with_requests(
        worse,
        lambda r: r.model_copy(
            update={
                "rounds": tuple(c.model_copy(update={"accepted": 1}) for c in r.rounds),
                "output_tokens": 1 + 2 * sum(c.count for c in r.rounds),
                "full_tokens": 2 * sum(c.count for c in r.rounds),
            }
        ),
    )
    paths = {name: write_run(tmp_path / name, [c]) for name, c in (("good", good), ("again", good), ("bad", worse))}
    paths["baseline"] = tmp_path / "baseline.json"
    assert spectune("baseline", paths["good"], "-o", paths["baseline"])[0] == 0
    return paths


def test_pass_regression_and_what_is_shown(runs, spectune):
    code, out, err = spectune("gate", runs["again"], "--baseline", runs["baseline"])
    assert (code, err) == (0, "")
    assert out.startswith("PASS: again against the baseline of good")
    code, out, _ = spectune("gate", runs["bad"], "--baseline", runs["baseline"])
    assert code == 1
    assert re.search(r"2\.00 \(-33\.3 %\) +1\.\d\d \(-40\.\d %\) +REGRESSION", out)  # acceptance beside speed
    assert "REGRESSION: code, batch 1, draft, K 4: speedup: " in out
    assert "\x1b" not in out


def test_the_table_fits_eighty_columns(runs, spectune):
    _, out, _ = spectune("gate", runs["bad"], "--baseline", runs["baseline"])
    table = out[out.index(" suite") : out.index("REGRESSION: code")]
    assert max(map(len, table.splitlines())) <= 80


def test_json_is_strict_and_alone_on_stdout(runs, spectune):
    code, out, _ = spectune("gate", runs["bad"], "--baseline", runs["baseline"], "--json", "--annotations")
    document = strict_json(out)
    assert document["verdict"] == "REGRESSION"
    assert document["exit_code"] == code == 1
    speed = next(c for c in document["checks"] if c["what"] == "speedup")
    assert speed["place"] == {"suite": "code", "drafter": "draft", "rule": "greedy", "k": 4, "batch": 1}
    assert speed["change"] < -0.3
    assert speed["detectable"] > 0


def test_junit_has_a_testcase_per_check_with_its_values(runs, spectune, tmp_path):
    args = ("gate", runs["bad"], "--baseline", runs["baseline"], "--junit", tmp_path / "j.xml", "--json")
    document = strict_json(spectune(*args)[1])
    suite = ElementTree.parse(tmp_path / "j.xml").getroot().find("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.get("tests")) == len(document["checks"])
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures")) > 0
    speed = next(c for c in cases if c.get("name") == "speedup")
    values = {p.get("name"): p.get("value") for p in speed.iter("property")}
    assert values["verdict"] == "REGRESSION"
    assert float(values["before"]) == pytest.approx(2.0, rel=0.01)
    assert float(values["change"]) < -0.3


def test_openmetrics_lists_the_numbers_and_ends(runs, spectune, tmp_path):
    spectune("gate", runs["again"], "--baseline", runs["baseline"], "--openmetrics", tmp_path / "m.txt")
    text = (tmp_path / "m.txt").read_text()
    assert text.endswith("# EOF\n")
    sample = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? [-+.e\d]+')
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert all(sample.fullmatch(line) for line in lines)
    assert 'spectune_acceptance_length{suite="code",drafter="draft",rule="greedy",k="4",batch="1"} 3' in lines
    assert "spectune_gate_exit_code 0" in lines


def test_the_step_summary_is_appended_where_github_says(runs, spectune, tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, _, err = spectune("gate", runs["bad"], "--baseline", runs["baseline"], "--step-summary")
    assert code == 2
    assert "GITHUB_STEP_SUMMARY is not set" in err
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    spectune("gate", runs["bad"], "--baseline", runs["baseline"], "--step-summary")
    assert summary.read_text().startswith("before\n### ❌ spectune gate: REGRESSION")
    spectune("gate", runs["bad"], "--baseline", runs["baseline"], "--markdown", tmp_path / "own.md")
    assert "before\n" + (tmp_path / "own.md").read_text() == summary.read_text()


def outcome_of(count: int, level="error", text=NASTY) -> Outcome:
    place = (text, text, "greedy", 4, 1)
    checks = [Check(text, "exact", place, "REGRESSION", f"{text}{i}", level) for i in range(count)]
    return Outcome(text, text, tuple(checks), (text,))


def test_a_summary_over_the_limit_is_cut_with_a_notice(tmp_path):
    path = tmp_path / "s.md"
    path.write_bytes(b"x" * 1000)
    assert not append_step_summary(path, markdown(outcome_of(30000, text="ä" * 20)))
    data = path.read_bytes()
    assert STEP_SUMMARY_BYTES - 200 < len(data) <= STEP_SUMMARY_BYTES
    assert "would exceed 1 MiB" in data.decode()
    assert not append_step_summary(path, "more\n" * 100)
    assert path.stat().st_size <= STEP_SUMMARY_BYTES


def test_a_full_step_summary_is_said(runs, spectune, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * STEP_SUMMARY_BYTES)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, _, err = spectune("gate", runs["again"], "--baseline", runs["baseline"], "--step-summary")
    assert code == 0
    assert "the step summary is full" in err


def test_checks_with_the_same_trouble_are_one_line(runs, spectune):
    path = runs["baseline"]
    other = json.loads(path.read_text())
    other["hardware"]["cpu"] = "another"
    path.write_text(json.dumps(other))
    code, out, _ = spectune("gate", runs["again"], "--baseline", path)
    lines = [line for line in out.splitlines() if "another machine" in line]
    assert code == 3
    assert len(lines) == 2  # one that decides, and one for the metrics that only warn
    assert lines[0].startswith("CANNOT JUDGE: code, batch 1, draft, K 4: speedup: ")
    assert re.match(r"warning: CANNOT JUDGE: \d checks \(code, batch 1, draft, K 4: \w+; …\): ", lines[1])


def test_at_most_ten_warnings_are_printed_and_the_others_counted(capsys):
    print_outcome(outcome_of(12, "warn", text="x"), Console())
    out = capsys.readouterr().out
    assert out.count("warning: ") == 10
    assert "2 more warnings" in out


def test_at_most_ten_annotations_of_a_kind_all_escaped():
    errors, warnings = outcome_of(11).checks, outcome_of(3, "warn").checks
    lines = annotation_lines(Outcome("r", None, errors + warnings))
    assert [line.partition(" ")[0] for line in lines] == ["::error"] * 10 + ["::warning"] * 3
    assert "2 more" in lines[9]
    for line in lines:
        assert "\n" not in line
        assert "\r" not in line
    title, _, message = lines[0].removeprefix("::error title=").partition("::")
    assert "%3A%3Aerror%3A%3Ax%2C" in title
    assert "%25%0D%0A" in message


def test_names_from_outside_break_no_format():
    outcome = outcome_of(2)
    root = ElementTree.fromstring(junit(outcome).encode())
    assert len(root.findall("testsuite/testcase")) == 2
    text = markdown(outcome)
    assert "<script>" not in text
    assert len([line for line in text.splitlines() if line.startswith("| a")]) == 1
    number = Check("accepted", "exact", (NASTY, "d", "greedy", 4, 1), "PASS", "", now=3.0)
    lines = openmetrics(Outcome("r", None, (number,))).splitlines()
    assert any(r"a|b<script>`*%" in line and r"\n::error" in line and '\\"\\\\"' in line for line in lines)


def wrong_use(spectune, *words) -> str:
    code, out, err = spectune("gate", *words)
    assert (code, out) == (2, "")
    assert err.startswith("spectune: error: ")
    assert err.count("\n") <= 2
    return err


def test_wrong_use_is_told_in_one_line_with_the_fix(runs, spectune, tmp_path):
    good, baseline = runs["good"], runs["baseline"]
    assert "--baseline FILE or --require" in wrong_use(spectune, good)
    assert "spectune baseline RUN -o" in wrong_use(spectune, good, "--baseline", tmp_path / "none.json")
    assert "is a directory" in wrong_use(spectune, good, "--baseline", good)
    cut = tmp_path / "cut.json"
    cut.write_text(baseline.read_text()[:500])
    assert "is not a baseline" in wrong_use(spectune, good, "--baseline", cut)
    assert "no run directory" in wrong_use(spectune, tmp_path / "nowhere", "--baseline", baseline)
    assert "holds no run.json" in wrong_use(spectune, tmp_path, "--baseline", baseline)
    assert "choose from exact, timed" in wrong_use(spectune, good, "--baseline", baseline, "--only", "fast")
    assert "known are" in wrong_use(spectune, good, "--require", "speed>=1")
    assert "give both" in wrong_use(spectune, good, "--baseline", baseline, "--accept-changes")
    assert "--baseline FILE" in wrong_use(spectune, good, "--require", "speedup>1", "--update-baseline")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "null", '"fast"'])
def test_a_time_that_is_no_number_is_never_a_pass(runs, spectune, constant):
    (file,) = (runs["again"] / "cells").iterdir()
    document = json.loads(file.read_text())
    document["passes"][0]["requests"][0]["full_seconds"] = "HERE"
    file.write_text(json.dumps(document).replace('"HERE"', constant))
    assert "cannot be read" in wrong_use(spectune, runs["again"], "--baseline", runs["baseline"])


def test_a_truncated_cell_is_never_a_pass(runs, spectune):
    (file,) = (runs["again"] / "cells").iterdir()
    file.write_text(file.read_text()[:-40])
    assert "cannot be read" in wrong_use(spectune, runs["again"], "--baseline", runs["baseline"])


def test_an_empty_run_cannot_be_judged(runs, spectune, tmp_path):
    shutil.rmtree(runs["again"] / "cells")
    assert spectune("gate", runs["again"], "--baseline", runs["baseline"])[0] == 3
    assert spectune("gate", runs["again"], "--require", "speedup>=1")[0] == 3
    code, _, err = spectune("baseline", runs["again"], "-o", tmp_path / "b.json")
    assert code == 3
    assert "--resume" in err
    assert not (tmp_path / "b.json").exists()


def test_a_run_with_failed_cells_is_no_baseline_and_exits_4(runs, spectune, tmp_path):
    broken = write_run(tmp_path / "broken", [timed_cell(2.0)], [failed(batch=8, repeats=5)])
    assert spectune("gate", broken, "--baseline", runs["baseline"])[0] == 4
    before = runs["baseline"].read_text()
    update = ("--update-baseline", "--accept-changes")
    assert spectune("gate", broken, "--baseline", runs["baseline"], *update)[0] == 4
    assert runs["baseline"].read_text() == before
    assert spectune("baseline", broken, "-o", tmp_path / "b.json")[0] == 4


def test_a_baseline_is_renewed_by_a_pass_or_by_an_explicit_switch(runs, spectune):
    baseline = runs["baseline"]
    assert spectune("gate", runs["again"], "--baseline", baseline, "--update-baseline")[0] == 0
    assert read_baseline(baseline).run == "again"
    code, _, err = spectune("gate", runs["bad"], "--baseline", baseline, "--update-baseline")
    assert code == 1
    assert "was not written: REGRESSION" in err
    assert read_baseline(baseline).run == "again"
    code, _, err = spectune("gate", runs["bad"], "--baseline", baseline, "--update-baseline", "--accept-changes")
    assert code == 0
    assert "acceptance_length 3 -> 2" in err
    assert read_baseline(baseline).run == "bad"
    assert spectune("gate", runs["bad"], "--baseline", baseline)[0] == 0


def test_a_baseline_of_counts_alone_stays_one(runs, spectune):
    spectune("baseline", runs["good"], "-o", runs["baseline"], "--exact-only")
    words = ("gate", runs["again"], "--baseline", runs["baseline"], "--only", "exact", "--update-baseline")
    assert spectune(*words)[0] == 0
    assert read_baseline(runs["baseline"]).cells[0].times is None


def test_one_repeat_is_warned_of_when_the_baseline_is_written(spectune, tmp_path):
    from synthetic_run import cell

    run = write_run(tmp_path / "one", [cell(repeats=1)])
    code, out, err = spectune("baseline", run, "-o", tmp_path / "b.json")
    assert code == 0
    assert "1 cells, 1 repeats" in out
    assert "--repeats 8" in err


def test_the_acceptance_length_is_shown_where_nothing_is_asked_of_it(spectune, runs, tmp_path):
    page = tmp_path / "gate.md"
    code, out, _ = spectune("gate", runs["bad"], "--require", "speedup>=0.1", "--markdown", page)
    assert code == 0
    assert re.search(r"\b2\.00 +1\.\d\d +PASS", out)
    assert re.search(r"\| 2\.00 \| 1\.\d\d \|", page.read_text())


def test_a_run_without_any_cell_is_no_pass_for_requirements_either(spectune, tmp_path):
    empty = write_run(tmp_path / "empty")
    assert spectune("gate", empty, "--require", "speedup>=1", "--tolerance", "1%")[0] == 3


def test_a_gate_starts_in_at_most_two_and_a_half_times_the_processor_time_of_its_libraries():
    """A limit in seconds would judge the machine. The best of three, since the first fills caches."""

    def spent(*arguments):
        times = []
        for _ in range(3):
            before = os.times()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            after = os.times()
            times.append(after.children_user + after.children_system - before.children_user - before.children_system)
        return min(times)

    libraries = "import typer, typer.rich_utils, rich.markdown, rich.table, pydantic"
    assert spent("-m", "spectune", "gate", "--help") < 2.5 * spent("-c", libraries)


def test_the_help_of_a_gate_imports_no_analysis():
    code = (
        "import sys; from spectune.cli.app import main\n"
        "sys.argv = ['spectune', 'gate', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'numpy', 'scipy', 'pandas', 'matplotlib', 'jinja2', 'yaml'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--baseline" in done.stdout
    assert done.stderr.strip() == "[]"


def test_neither_a_whole_gate_nor_a_baseline_imports_torch(runs, tmp_path):
    for arguments in (
        [
            "gate",
            runs["bad"],
            "--baseline",
            runs["baseline"],
            "--require",
            "tpot_ms.p95<1",
            "--junit",
            tmp_path / "j.xml",
        ],
        ["baseline", runs["good"], "-o", tmp_path / "b.json"],
    ):
        code = (
            "import sys\n"
            f"sys.argv = ['spectune', *{[str(a) for a in arguments]!r}]\n"
            "from spectune.cli import main\n"
            "try:\n    main()\n"
            "except SystemExit:\n    pass\n"
            "print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_with_a_regression_and_cells_without_a_result_is_no_baseline(runs, spectune, tmp_path):
    lost = spec(batch=8, repeats=5)
    worse = timed_cell(1.0)
    baseline, before = runs["baseline"], runs["baseline"].read_text()
    update = ("--baseline", baseline, "--update-baseline", "--accept-changes")
    for name, more in (("broken", {"failures": [failed(batch=8, repeats=5)]}), ("open", {"plan": (worse.spec, lost)})):
        run = write_run(tmp_path / name, [worse], **more)
        code, out, err = spectune("gate", run, *update)
        assert out.startswith("REGRESSION")
        assert code == 1
        assert "was not written" in err
        assert "--resume" in err
        assert baseline.read_text() == before


def test_names_from_outside_make_no_line_of_their_own_and_reach_no_terminal(spectune, tmp_path):
    name = "a\x1b[31m\n::error::no\u202e"
    run = write_run(tmp_path / "run", [timed_cell(2.0, suite=name)], [failed(message=name, batch=8)], name=name)
    baseline = tmp_path / "b.json"
    assert spectune("baseline", write_run(tmp_path / "old", [timed_cell(2.0)]), "-o", baseline)[0] == 0
    summary = tmp_path / "s.md"
    plain = ("gate", run, "--baseline", baseline)
    for words in (plain, (*plain, "--annotations", "--markdown", summary), (*plain, "--require", "speedup[x]>1")):
        _, out, err = spectune(*words)
        told = [line for line in (out + err).splitlines() if line.startswith("::error") and "title=" not in line]
        assert told == []
        assert not {"\x1b", "\u202e"} & set(out + err)
    assert not {"\x1b", "\u202e"} & set(summary.read_text())
    again = write_run(tmp_path / "again", [timed_cell(2.0, suite=name)])
    _, _, err = spectune("gate", again, "--baseline", baseline, "--update-baseline", "--accept-changes")
    assert "added" in err
    assert not {"\x1b", "\u202e"} & set(err)
    assert not any(line.startswith("::") for line in err.splitlines())


@pytest.mark.parametrize("gpus", [[0], "none", [None, {}], {}])
@pytest.mark.parametrize("device", ["cuda:x", "cuda:0", "cuda"])
def test_an_environment_that_is_not_understood_is_no_traceback(spectune, tmp_path, gpus, device):
    environment = {"device": device, "gpus": gpus}
    run = write_run(tmp_path / "run", [timed_cell(2.0)], environment=environment)
    assert spectune("gate", run, "--require", "speedup>=1")[0] == 0


def test_a_count_larger_than_any_is_refused(runs, spectune):
    baseline = json.loads(runs["baseline"].read_text())
    baseline["cells"][0]["times"]["plain"][0]["tokens"][0] = 10**400
    runs["baseline"].write_text(json.dumps(baseline))
    assert "is not a baseline" in wrong_use(spectune, runs["good"], "--baseline", runs["baseline"])


@pytest.mark.parametrize("kind", ["good", "bad"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_leaves_does_not_change_the_exit_code(runs, kind, form):
    command = (sys.executable, "-m", "spectune", "gate", str(runs[kind]), "--baseline", str(runs["baseline"]), *form)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == ({"good": 0, "bad": 1}[kind], b"")


def test_a_stdout_without_unicode_does_not_change_the_exit_code(spectune, tmp_path):
    run = write_run(tmp_path / "run", [timed_cell(2.0, suite="été\u202e")])
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = (sys.executable, "-m", "spectune", "gate", str(run), "--require", "speedup>=1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PASS" in done.stdout
