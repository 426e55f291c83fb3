"""`spectune verify` as a user runs it, its files, and what reports make of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import save_tiny
from synthetic_run import cell, failed, strict_json, write_run
from test_decoder_greedy import with_tokenizer
from verify_helpers import save_near

from spectune.decoding import rules
from spectune.errors import UsageError
from spectune.speedup.run import load_run
from spectune.sweeping.cell import CellSpec
from spectune.sweeping.rundir import RunDirectory
from spectune.verifying.record import (
    Audit,
    AuditSpec,
    DistributionCheck,
    IdentityCheck,
    Parting,
    SetTest,
    read_audits,
    write_audit,
)
from spectune.verifying.stamp import stamps


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = with_tokenizer(save_tiny(folder / "target"), 128)
    near = with_tokenizer(save_near(folder / "near", target), 128)
    suite = folder / "mine.jsonl"
    suite.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"w{i + 3} w9 w{20 + i}"}) + "\n" for i in range(5)))
    return target, near, suite


@pytest.fixture
def verify(spectune, models):
    target, near, suite = models

    def call(*words, draft=near):
        return spectune(
            "verify", "--target", target, "--draft", draft, "--suite", suite, "--prompts", 3, "--max-new-tokens", 12,
            "--dtype", "float32", "--device", "cpu", "--ignore-eos", *words,
        )  # fmt: skip

    return call


def test_every_combination_is_audited_kept_and_shown(verify, spectune, tmp_path):
    run = tmp_path / "run"
    code, out, err = verify("--k", "2,4", "--batch", "1,3", "-o", run)
    assert code == 0, err
    assert out.count("identical") == 4
    assert "[4/4]" in err
    assert "left)" in err  # a forecast after each audit but the last
    audits = read_audits(run)
    assert {(a.cell.k, a.cell.batch, a.verdict) for a in audits} == {
        (k, b, "identical") for k in (2, 4) for b in (1, 3)
    }
    assert {p.name for p in (run / "verify").iterdir()} == {f"{a.key}.json" for a in audits}
    again = verify("--k", "2,4", "--batch", "1,3", "-o", run)
    assert again[0] == 0
    assert len(read_audits(run)) == 4  # a newer audit replaces the older one


def test_resume_audits_only_what_is_missing_or_was_judged_otherwise(verify, monkeypatch, tmp_path):
    from spectune.verifying import audit

    run, decoded = tmp_path / "run", []
    good = audit.decode_speculatively
    monkeypatch.setattr(
        audit, "decode_speculatively", lambda e, spec, *a, **k: decoded.append(spec.batch) or good(e, spec, *a, **k)
    )
    sampled = ("--temperature", "1", "--samples", "60", "--json")
    verify(*sampled, "--batch", "1,3", "-o", run)
    before = {a.key: a for a in read_audits(run)}
    written = {path: path.stat().st_mtime_ns for path in (run / "verify").iterdir()}
    decoded.clear()
    code, out, err = verify(*sampled, "--batch", "1,3", "-o", run, "--resume")
    assert (code, decoded) == (3, [])  # verdict and exit code are those of the kept audits
    assert err.count("kept, cannot judge") == 2
    assert {a["key"] for a in strict_json(out)["audits"]} == set(before)
    assert "left)" not in err  # what is kept takes no time, so nothing is known of it
    assert {a.key: a for a in read_audits(run)} == before
    assert {path: path.stat().st_mtime_ns for path in (run / "verify").iterdir()} == written

    (run / "verify" / f"{next(k for k, a in before.items() if a.cell.batch == 3)}.json").unlink()
    verify(*sampled, "--batch", "1,3", "-o", run, "--resume")
    assert decoded == [3]

    decoded.clear()
    verify(*sampled, "--batch", "3", "-o", run, "--resume")  # one audit: each test may use more of the error budget
    assert decoded == [3]

    decoded.clear()
    monkeypatch.setattr(audit, "__version__", "9.9")
    verify(*sampled, "--batch", "3", "-o", run, "--resume")
    assert decoded == [3]

    verify("--batch", "3", "-o", run)
    decoded.clear()
    _, _, err = verify("--batch", "3", "-o", run, "--resume")  # greedy
    assert decoded == []
    assert "kept, identical" in err
    verify("--batch", "3", "-o", run)  # not asked to resume
    assert decoded == [3]

    code, _, err = verify("--resume")
    assert code == 2
    assert "-o" in err


def test_json_is_strict_alone_on_stdout_and_holds_the_records(verify, tmp_path):
    code, out, err = verify("--json", "--quiet", "-o", tmp_path / "run")
    document = strict_json(out)
    assert (code, err, document["exit_code"]) == (0, "", 0)
    kept = {a.key: a.model_dump(mode="json") for a in read_audits(tmp_path / "run")}
    assert {a["key"]: a for a in document["audits"]} == kept


def test_sampled_audits_exit_by_verdict(verify, monkeypatch):
    sampled = ("--temperature", "1", "--batch", "3", "--json", "--quiet")
    code, out, _ = verify(*sampled, "--samples", "1200")
    (found,) = strict_json(out)["audits"]
    assert (code, found["verdict"]) == (0, "consistent")
    assert found["detectable"] < 0.1
    assert found["identity"]["kind"] == "seeded"
    assert verify(*sampled, "--samples", "60")[0] == 3
    assert verify(*sampled, "--samples", "400", "--rule", "typical")[0] == 1
    code, out, _ = verify(*sampled, "--samples", "60", "--rule", "match")
    assert (code, strict_json(out)["audits"][0]["verdict"]) == (0, "identical")

    monkeypatch.setattr(rules, "_residual", lambda p, q, accepted, counts, weight: rules._row(p, accepted))
    code, out, _ = verify(*sampled, "--samples", "1200")
    (found,) = strict_json(out)["audits"]
    assert (code, found["verdict"]) == (1, "FAIL")
    assert "favoured tokens" in found["reason"]


def test_a_broken_greedy_rule_exits_with_1_and_names_the_place(verify, monkeypatch):
    good = rules.match
    monkeypatch.setattr(
        rules,
        "match",
        lambda tokens, counts, choices: rules.Verdict(good(tokens, counts, choices).accepted, choices[:, 0]),
    )
    code, out, _ = verify()
    assert code == 1
    assert "FAIL: mine, batch 1" in out
    for word in ("output position", "plain decoding has", "top-2 margin", "gap", "rounding"):
        assert word in out


def test_an_audit_that_breaks_off_exits_with_4_and_the_others_are_kept(verify, monkeypatch, tmp_path):
    from spectune.verifying import audit

    good = audit.decode_speculatively

    def out_of_memory(engine, spec, *rest, **more):
        if spec.batch == 3:
            raise RuntimeError("out of memory")
        return good(engine, spec, *rest, **more)

    monkeypatch.setattr(audit, "decode_speculatively", out_of_memory)
    code, out, _ = verify("--batch", "1,3,4", "-o", tmp_path / "run")
    assert code == 4
    assert "failed: mine, batch 3" in out
    assert {a.cell.batch for a in read_audits(tmp_path / "run")} == {1, 4}


@pytest.mark.parametrize("becomes", ["itself", "an error"])
def test_an_interrupt_keeps_what_was_finished(verify, monkeypatch, tmp_path, becomes):
    from spectune.verifying import audit

    good = audit.decode_speculatively

    def interrupted(engine, spec, *rest, **more):
        if spec.batch == 3:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except KeyboardInterrupt:
                if becomes == "itself":
                    raise
                raise RuntimeError("error calling function: KeyboardInterrupt") from None
        return good(engine, spec, *rest, **more)

    monkeypatch.setattr(audit, "decode_speculatively", interrupted)
    code, _, err = verify("--batch", "1,3", "-o", tmp_path / "run")
    assert code == 130
    assert "1 of 2 audits are done" in err
    assert "go on with --resume" in err
    assert len(read_audits(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rule", "block"), "temperature above 0"),
        (("--rule", "nothing"), "no rule"),
        (("--max-new-tokens", "1"), "never drafted"),
        (("--samples", "0"), "--samples"),
        (("--k", "0"), "--k"),
        (("--limit", "0"), "at least 1"),
        (("--temperature", "-1"), "--temperature"),
    ],
)
def test_wrong_use_exits_with_2(verify, words, said):
    code, out, err = verify(*words)
    assert code == 2
    assert said in err
    assert out == ""


def test_a_folder_of_something_else_and_a_run_of_another_target_are_refused(verify, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    code, _, err = verify("-o", tmp_path / "photos")
    assert code == 2
    assert "cat.jpg" in err
    run = write_run(tmp_path / "run", [cell()])
    code, _, err = verify("-o", run)
    assert code == 2
    assert "is a run of target" in err


def test_help_needs_no_torch():
    code = (
        "import sys\nsys.argv = ['spectune', 'verify', '--help']\nfrom spectune.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "spectune verify --draft" in done.stdout.replace("Usage: spectune verify", "")


# --- records, stamps, reports: made by hand, no model


def audit_of(spec: CellSpec, *, verdict: str = "identical", when: str = "2026-02-03T04:05:06+00:00", detectable=None):
    whole = AuditSpec(cell=spec, samples=0 if spec.sampling.greedy else 3000)
    identity = IdentityCheck(
        kind="greedy", requests=10, identical=9, tokens=320, drafted=200, accepted=100,
        partings=(Parting(id="p1", position=4, expected=3, found=7, margin=0.1, gap=0.1, noise=0.2, is_tie=True),),
    )  # fmt: skip
    distribution = None
    if detectable is not None:
        favoured = SetTest(name="favoured", tokens=900, seen=300, expected=301.5, p_value=1.0, detectable=detectable)
        distribution = DistributionCheck(
            tokens=3000, continuations=100, prompts=10, drafted=900, accepted=300, rounding=0.0, tolerance=0.0,
            alpha=1e-5, distance=0.01, uniformity_p=0.5, independence_p=None, sets=(favoured,),
        )  # fmt: skip
    return Audit(
        key=whole.key, spec=whole, audited_at=when, spectune_version="0.1.0", seconds=1.5, verdict=verdict,
        reason="by hand", detectable=detectable, identity=identity, distribution=distribution,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """K 2 and 4 at batch 1; ngram K 4 is fastest."""
    cells = [
        cell(drafter=d, drafter_digest="none", k=k, speedup=s) for d, k, s in (("ngram", 2, 1.2), ("ngram", 4, 2.0))
    ]
    return write_run(tmp_path / "run", [*cells, cell(drafter="slow", k=4, speedup=0.9)])


def keep(run, *audits):
    for audit in audits:
        write_audit(RunDirectory(run), audit)


def spec_in(run, drafter: str, k: int) -> CellSpec:
    return next(s for s in load_run(run).info.plan if (s.drafter, s.k) == (drafter, k))


def test_a_record_comes_back_as_it_was(run):
    audit = audit_of(spec_in(run, "ngram", 4))
    keep(run, audit)
    assert read_audits(run) == (audit,)
    assert not list((run / "verify").glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 9'), "schema version 9"),
        (lambda text: text.replace('"seconds": 1.5', '"seconds": NaN'), "cannot be read"),
        (lambda text: text.replace('"max_new_tokens": 256', '"max_new_tokens": 255'), "key does not match"),
    ],
)
def test_a_damaged_or_newer_record_stops_the_report(run, change, said):
    audit = audit_of(spec_in(run, "ngram", 4))
    keep(run, audit)
    path = run / "verify" / f"{audit.key}.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=said):
        read_audits(run)


def test_a_renamed_record_is_refused(run):
    audit = audit_of(spec_in(run, "ngram", 4))
    keep(run, audit)
    (run / "verify" / f"{audit.key}.json").rename(run / "verify" / "mine.json")
    with pytest.raises(UsageError, match="renamed"):
        read_audits(run)


def test_a_stamp_covers_the_cells_that_were_audited_and_names_the_command_for_the_rest(run):
    plan = load_run(run).info.plan
    ngram, slow = stamps(plan, [audit_of(spec_in(run, "ngram", 4))], run)
    assert (ngram.verdict, ngram.ks, ngram.batches) == ("identical", (4,), (1,))
    assert "--k 2 --batch 1" in ngram.command
    assert (slow.verdict, slow.date) == (None, None)
    assert slow.line.startswith("not audited; run: spectune verify --target target --draft slow --suite code --k 4")
    assert slow.command.endswith(f"-o {run}")


def test_the_worst_audit_and_the_weakest_power_make_the_stamp(run):
    plan = load_run(run).info.plan
    audits = [
        audit_of(spec_in(run, "ngram", 2), verdict="numeric ties", detectable=0.03),
        audit_of(spec_in(run, "ngram", 4), verdict="FAIL", detectable=0.05, when="2026-02-04T00:00:00+00:00"),
    ]
    ngram = stamps(plan, audits, run)[0]
    assert (ngram.verdict, ngram.detectable, ngram.command) == ("FAIL", 0.05, None)
    assert ngram.line == "audited FAIL on 2026-02-04 (code: K 2, 4 at batch 1; finds a bias of 0.050 per token)"


@pytest.mark.parametrize(
    "other", [{"drafter_digest": "retrained"}, {"dtype": "bfloat16"}, {"rule": "match"}, {"target_digest": "t1"}]
)
def test_an_audit_of_other_weights_or_settings_says_nothing(run, other):
    spec = spec_in(run, "ngram", 4)
    changed = CellSpec(**(spec.model_dump() | other))
    assert stamps(load_run(run).info.plan, [audit_of(changed)], run)[0].verdict is None


def test_recommend_says_whether_the_choice_was_audited(spectune, run):
    _, out, _ = spectune("recommend", run)
    assert "Losslessness: not audited; run: spectune verify --target target --draft ngram" in out
    keep(run, audit_of(spec_in(run, "ngram", 2)))  # another K than the recommended one
    assert "Losslessness: not audited" in spectune("recommend", run)[1]
    keep(run, audit_of(spec_in(run, "ngram", 4), detectable=0.04, verdict="consistent"))
    _, out, _ = spectune("recommend", run)
    assert "Losslessness: audited consistent on 2026-02-03 (code: K 4 at batch 1; finds a bias" in out
    document = strict_json(spectune("recommend", run, "--json")[1])
    assert document["losslessness"]["choice"]["verdict"] == "consistent"
    assert [s["verdict"] for s in document["losslessness"]["drafters"]] == ["consistent", None]


def test_where_speculation_is_off_there_is_nothing_to_audit(spectune, tmp_path):
    run = write_run(tmp_path / "slow", [cell(speedup=0.8)])
    assert "Losslessness" not in spectune("recommend", run)[1]


def test_the_page_shows_a_stamp_for_each_drafter_and_every_audit(spectune, run, tmp_path):
    page = tmp_path / "page.html"
    spectune("report", run, "-o", page)
    assert page.read_text().count("not audited") == 3  # the answer and two drafters
    keep(run, audit_of(spec_in(run, "ngram", 4), verdict="FAIL", detectable=0.0421))
    document = strict_json(spectune("report", run, "-o", page, "--json")[1])
    text = page.read_text()
    assert text.count("not audited") == 1
    assert text.count(">FAIL<") == 3  # the answer, the stamp and the audit
    assert "0.042" in text
    assert "2026-02-03" in text
    assert "by hand" in text
    assert [a["verdict"] for a in document["audits"]] == ["FAIL"]


def test_a_run_without_a_finished_cell_shows_its_stamps_too(spectune, tmp_path):
    run = write_run(tmp_path / "empty", failures=[failed()])
    page = tmp_path / "page.html"
    assert spectune("report", run, "-o", page)[0] == 0
    assert "not audited" in page.read_text()


def test_reports_with_audits_load_no_torch(run):
    keep(run, audit_of(spec_in(run, "ngram", 4)))
    code = (
        f"import sys\nsys.argv = ['spectune', 'recommend', {str(run)!r}]\nfrom spectune.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "audited identical" in done.stdout


def test_names_in_commands_are_quoted(tmp_path):
    run = write_run(tmp_path / "a run", [cell(drafter="my draft; rm", k=4)])
    command = stamps(load_run(run).info.plan, [], run)[0].command
    assert "--draft 'my draft; rm'" in command
    assert command.endswith(f"-o '{run}'")
