"""`spectune recommend` and `spectune fit` as a user runs them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from synthetic_run import cell, failed, strict_json, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [cell(k=k, batch=b, speedup=1.5) for k in (1, 2, 4) for b in (1, 4)])


@pytest.mark.parametrize("command", ["recommend", "fit"])
def test_json_is_strict_alone_on_stdout_and_kept_in_the_run(spectune, run, command):
    code, out, err = spectune(command, run, "--json")
    document = strict_json(out)
    assert (code, err) == (0, "")
    kept = run / {"recommend": "recommendation.json", "fit": "fit.json"}[command]
    assert strict_json(kept.read_text()) == document
    assert not list(run.glob("*.tmp")) + list(run.glob(".*.tmp"))


def test_the_terminal_prints_the_numbers_of_the_json(spectune, run):
    _, out, _ = spectune("recommend", run, "--json")
    found = strict_json(out)["overall"]["speedup"]
    _, shown, _ = spectune("recommend", run)
    assert f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})" in shown


@pytest.mark.parametrize("command", [["recommend"], ["recommend", "--all"], ["fit"], ["fit", "--all"]])
def test_tables_fit_80_columns_without_colours_where_there_is_no_terminal(spectune, tmp_path, command):
    name = "organisation/a-model-with-a-rather-long-name-0.5B-instruct"
    run = write_run(tmp_path / "long", [cell(k=k, batch=b, drafter=name) for k in (2, 16) for b in (1, 64)])
    _, out, _ = spectune(*command, run)
    assert "\x1b" not in out
    rows = [line for line in out.splitlines() if line.count("  ") > 3]
    assert rows
    assert max(map(len, rows)) <= 80


def test_the_answer_comes_first_and_the_next_commands_last(spectune, run):
    _, out, _ = spectune("recommend", run)
    lines = out.splitlines()
    assert lines[1] == "draft, K 1  [FASTER]"
    commands = [line.split("#")[0].split() for line in lines[lines.index("next") + 1 :]]
    assert commands == [
        ["spectune", "recommend", str(run), "--for", "vllm"],
        ["spectune", "recommend", str(run), "--all"],
        ["spectune", "report", str(run)],
    ]
    for words in commands:
        assert spectune(*words[1:])[0] == 0


def test_the_next_commands_ask_for_the_same_answer(spectune, tmp_path):
    cells = [cell(suite=suite, batch=b, speedup=1.5) for suite in ("code", "chat") for b in (1, 4)]
    run = write_run(tmp_path / "mixed", cells)
    asked = ["--mix", "code=0.75,chat=0.25", "--objective", "goodput", "--slo", "ttft=1s,tpot=250ms"]
    _, out, _ = spectune("recommend", run, *asked)
    lines = out.splitlines()
    commands = [shlex.split(line.split("#")[0]) for line in lines[lines.index("next") + 1 :]]
    asked[-1] = "ttft=1000ms,tpot=250ms"
    for words in commands:
        assert words[:3] == ["spectune", words[1], str(run)]
        if words[1] == "recommend":
            assert words[3 : 3 + len(asked)] == asked
            code, again, _ = spectune(*words[1:])
            assert code == 0
            assert again.splitlines()[1] == lines[1]
    assert [words[1] for words in commands].count("recommend") == 2


def test_every_suite_and_batch_has_a_row_with_bars_in_proportion(spectune, tmp_path):
    run = write_run(tmp_path / "bars", [cell(batch=b, speedup=s) for b, s in {1: 2.0, 4: 1.0, 16: 0.5}.items()])
    _, out, _ = spectune("recommend", run)
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith(" code")}
    speedups = [rows[b].split(")  ")[-1] for b in ("1", "4", "16")]
    assert [bar.split()[0] for bar in speedups] == ["██████", "███", "█▌"]
    assert all(row.rstrip().endswith("3.00 ████") for row in rows.values())  # every cell accepts alike
    assert "draft, K 4" in rows["1"]
    assert "OFF (SLOWER)" in rows["16"]


def test_bars_are_ascii_where_the_encoding_has_no_blocks(run):
    code = "import sys; from spectune.cli import main; sys.argv[:] = ['spectune', *sys.argv[1:]]; main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code, "recommend", run], capture_output=True, check=True, env=environment
    )
    rows = [line for line in done.stdout.decode("ascii").splitlines() if re.match(r"[| ]*code\b", line)]
    assert len(rows) == 2
    assert all("######" in row for row in rows)


def test_no_color_takes_the_colours_from_a_terminal(spectune, run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in spectune("recommend", run)[1]  # FASTER is green
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", spectune("recommend", run)[1])


def test_off_is_an_answer_and_exits_with_0(spectune, tmp_path):
    run = write_run(tmp_path / "slow", [cell(speedup=0.8)])
    code, out, _ = spectune("recommend", run, "--all")
    assert code == 0
    assert "OFF: decode without speculation" in out
    assert "SLOWER" in out
    assert "Leave --speculative-config out" in out


def test_a_speedup_beyond_the_acceptance_length_is_never_faster(spectune, tmp_path):
    """K 4 keeps 2 of 4: three tokens a round cannot be 3.5 times as fast."""
    run = write_run(tmp_path / "disturbed", [cell(speedup=3.5), cell(speedup=3.5, suite="math", k=8), cell(batch=4)])
    _, out, _ = spectune("recommend", run, "--json")
    places = {(a["suite"], a["batch"]): a for a in strict_json(out)["by_suite_and_batch"]}
    assert (places["code", 1]["verdict"], places["code", 1]["speculate"]) == ("CAN'T TELL", False)
    assert "exceeds the acceptance length 3.00" in places["code", 1]["why"][0]
    assert places["math", 1]["verdict"] == places["code", 4]["verdict"] == "FASTER"
    alone = write_run(tmp_path / "alone", [cell(speedup=3.5)])
    objective = strict_json(spectune("recommend", alone, "--objective", "latency", "--json")[1])
    first = objective["objective"][0]
    assert first["ranking"][0]["gain"]["verdict"] == "CAN'T TELL"
    assert not first["speculate"]


def test_an_engine_is_offered_the_best_that_it_has(spectune, tmp_path):
    best, second = "tree:eagle3:a/b", "eagle3:a/b"
    run = write_run(tmp_path / "two", [cell(drafter=best, speedup=2.5), cell(drafter=second, speedup=1.5)])
    _, out, _ = spectune("recommend", run, "--for", "vllm")
    assert out.splitlines()[1] == f"{second}, K 4  [FASTER]"
    assert f"Over all it would be {best}, K 4, 2.5" in out
    assert "which vLLM 0.32 lacks" in out
    assert '"method": "eagle3"' in out
    document = strict_json(spectune("recommend", run, "--for", "vllm", "--json")[1])
    assert document["overall"]["choice"]["drafter"] == second
    assert document["beyond_engine"]["choice"]["drafter"] == best
    _, out, _ = spectune("recommend", run, "--for", "sglang")  # which has both
    assert out.splitlines()[1] == f"{best}, K 4  [FASTER]"
    assert "Over all" not in out
    assert strict_json(spectune("recommend", run, "--json")[1])["beyond_engine"] is None


def test_an_engine_that_has_none_of_it_says_so(spectune, tmp_path):
    run = write_run(tmp_path / "one", [cell(drafter="blockwise:a/b", speedup=1.5)])
    _, out, _ = spectune("recommend", run, "--for", "vllm")
    assert "has no blockwise method" in out


def test_one_engine_can_be_asked_for(spectune, run):
    _, out, _ = spectune("recommend", run, "--for", "vllm", "--json")
    assert [f["engine"] for f in strict_json(out)["flags"]] == ["vllm"]
    code, _, err = spectune("recommend", run, "--for", "nothing")
    assert code == 2
    assert "llama.cpp" in err


def test_asking_for_an_engine_leaves_the_kept_answer_whole(spectune, run):
    spectune("recommend", run)
    kept = (run / "recommendation.json").read_bytes()
    assert spectune("recommend", run, "--for", "vllm")[0] == 0
    assert (run / "recommendation.json").read_bytes() == kept


def test_asking_for_an_engine_prints_the_choice_and_its_settings_alone(spectune, run):
    _, out, _ = spectune("recommend", run, "--for", "vllm")
    assert "draft, K 1  [FASTER]" in out
    assert "--speculative-config" in out
    for part in ("by batch", "regret", "Pareto", "advice", "decodes 1.5"):
        assert part not in out


def test_schedule_regret_and_pareto_set_are_printed_and_in_the_json(spectune, tmp_path):
    run = write_run(tmp_path / "falls", [cell(batch=b, speedup=s) for b, s in {1: 2.0, 4: 1.2, 16: 0.6}.items()])
    short = ("K by batch: draft", "stops paying at batch", "batch-too-large")
    long = ("regret: the oracle", "Pareto set, tokens/s", "by batch  ", "\nsettings\n")
    _, out, _ = spectune("recommend", run)
    assert [part in out for part in (*short, *long)] == [True] * 3 + [False] * 4
    _, out, _ = spectune("recommend", run, "--all")
    assert [part in out for part in (*short, *long)] == [True] * 7
    document = strict_json(spectune("recommend", run, "--json")[1])
    assert [row["k"] for row in document["best_schedule"]["rows"]] == [4, 4, 0]
    assert 4 < document["best_schedule"]["crossover"]["value"] < 16
    assert [r["policy"] for r in document["regret"]] == ["off", "static", "schedule", "oracle"]
    assert document["objective"] is None


def test_an_objective_leads_the_answer_and_its_settings(spectune, tmp_path):
    run = write_run(tmp_path / "two", [cell(batch=1, k=8, speedup=2.0), cell(batch=8, k=8, speedup=0.7)])
    code, out, _ = spectune("recommend", run, "--objective", "latency", "--all")
    assert code == 0
    assert "objective latency" in out
    assert "draft, K 8 at batch 1  [FASTER]" in out
    assert '"num_speculative_tokens": 8' in out
    code, out, _ = spectune("recommend", run, "--objective", "throughput", "--json")
    (found,) = strict_json(out)["objective"]
    assert (found["speculate"], found["verdict"], found["choice"]["batch"]) == (False, "SLOWER", 8)
    code, out, _ = spectune("recommend", run, "--objective", "goodput", "--slo", "tpot=6ms")
    assert "goodput: TPOT at most 6 ms" in out
    assert "; no request of plain decoding meets the service level" in out
    assert "draft, K 8 at batch 1" in out


def test_wrong_objectives_and_mixes_exit_with_2(spectune, run):
    for words in (["--objective", "speed"], ["--objective", "goodput"], ["--slo", "ttft=1s"], ["--mix", "maths=1"]):
        code, out, err = spectune("recommend", run, *words)
        assert (code, out) == (2, "")
        assert err.startswith("spectune: error: ")
        assert err.count("\n") <= 2  # the error, and what to do about it


def test_a_mix_is_what_the_overall_answer_is_about(spectune, tmp_path):
    cells = [cell(suite=s, suite_digest=s, speedup=v) for s, v in {"code": 3.0, "chat": 0.5}.items()]
    run = write_run(tmp_path / "mix", cells)
    chosen = {
        mix: strict_json(spectune("recommend", run, "--mix", mix, "--json")[1])["overall"]["speculate"]
        for mix in ("code=9,chat=1", "code=1,chat=9")
    }
    assert chosen == {"code=9,chat=1": True, "code=1,chat=9": False}


def test_a_batch_with_a_better_configuration_has_its_own_settings(spectune, tmp_path):
    speeds = {(1, 2): 1.2, (1, 8): 2.0, (4, 2): 1.3, (4, 8): 0.7}
    run = write_run(tmp_path / "two", [cell(batch=b, k=k, speedup=s) for (b, k), s in speeds.items()])
    _, out, _ = spectune("recommend", run, "--for", "vllm")
    assert "settings for batch 1" in out
    _, out, _ = spectune("recommend", run, "--json")
    document = strict_json(out)
    assert document["overall"]["choice"]["k"] == 2
    assert list(document["flags_by_batch"]) == ["1"]
    assert '"num_speculative_tokens": 8' in document["flags_by_batch"]["1"][0]["text"]


def test_a_warning_of_many_cells_is_printed_once(spectune, tmp_path):
    run = write_run(tmp_path / "w", [cell(k=k, warnings=(f"unstable: {k}0%; repeat",)) for k in (1, 2, 4)])
    _, out, _ = spectune("recommend", run)
    assert out.count("unstable") == 1
    assert "warnings (cells of 3): unstable (3)\n" in out
    _, out, _ = spectune("recommend", run, "--all")
    assert out.count("unstable") == 1
    assert "warning in 3 of 3 cells: unstable: for instance, 10%; repeat" in out


def test_names_are_printed_as_they_are_and_control_characters_are_not(spectune, tmp_path):
    run = write_run(tmp_path / "odd", [cell(drafter="[bold]x[/bold] :smile: \x1b[31mred", drafter_digest="")])
    _, out, _ = spectune("recommend", run)
    assert "[bold]x[/bold] :smile:" in out
    assert "\x1b" not in out


def test_wrong_results_and_failures_are_loud(spectune, tmp_path):
    run = write_run(tmp_path / "mixed", [cell(k=2), cell(k=4, identical=False)], [failed("no memory", k=8)])
    _, out, _ = spectune("recommend", run)
    assert "WRONG RESULT: code, batch 1, draft, K 4" in out
    assert "failed: code, batch 1, draft, K 8: oom: no memory" in out
    _, out, _ = spectune("recommend", run, "--json")
    document = strict_json(out)
    assert document["excluded"][0]["k"] == 4
    assert document["failed"][0]["failure"] == "oom: no memory"


def test_a_run_without_a_finished_cell_exits_with_3(spectune, tmp_path):
    run = write_run(tmp_path / "failed", failures=[failed()])
    for command in ("recommend", "fit"):
        code, out, err = spectune(command, run)
        assert (code, out) == (3, "")
        assert "1 failed" in err


def test_a_missing_run_exits_with_2_and_says_how_to_name_one(spectune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = spectune("recommend")
    assert code == 2
    assert "spectune recommend runs/NAME" in err
    write_run(tmp_path / "runs" / "one", [cell()])
    assert spectune("recommend")[0] == 0


def test_a_read_only_run_only_warns(spectune, run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    code, out, err = spectune("recommend", run, "--json")
    assert code == 0
    assert strict_json(out)
    assert "warning: cannot write" in err
    assert not list(run.glob(".*.tmp"))


def test_fit_says_how_wrong_the_models_are(spectune, run):
    code, out, _ = spectune("fit", run)
    assert code == 0
    assert "card: RMSE" in out
    assert "full: RMSE" in out
    for part in ("acceptance by position", "measured and predicted", "to the measured speedup"):
        assert part not in out.replace("--all: acceptance by position", "")
        assert part in spectune("fit", run, "--all")[1]
    _, out, _ = spectune("fit", run, "--json")
    models = strict_json(out)["models"]
    assert models["card"]["cells"] == 6
    assert models["full"]["rmse"] is not None


def test_fit_says_how_many_prompts_a_precision_needs(spectune, run):
    code, out, _ = spectune("fit", run, "--precision", "2%", "--json")
    assert code == 0
    samples = strict_json(out)["samples"]
    assert len(samples) == 6
    assert all(s["enough"] and s["prompts"] == 8 and s["half_width"] == 0 for s in samples)  # all prompts are alike
    _, out, _ = spectune("fit", run, "--precision", "2%")
    assert "prompts for an acceptance length within 2.0%" in out
    code, _, err = spectune("fit", run, "--precision", "200%")
    assert code == 2
    assert "write for instance 2%" in err


def test_fit_of_unidentifiable_data_prints_reasons(spectune, tmp_path):
    run = write_run(tmp_path / "one", [cell(timed=False)])
    code, out, _ = spectune("fit", run, "--json")
    document = strict_json(out)
    assert code == 0
    assert document["curves"][0]["curve"] is None
    assert "not identifiable" in document["curves"][0]["reason"]
    assert document["predictions"][0]["card_reason"]
    assert spectune("fit", run)[0] == 0


@pytest.mark.parametrize("command", ["recommend", "fit", "report"])
def test_analysis_never_imports_a_model_library(run, command):
    scipy = {"scipy"} if command == "recommend" else set()  # the others fit latency surfaces
    program = (
        "import sys\n"
        "from spectune.cli.app import app\n"
        f"app([{command!r}, {str(run)!r}], standalone_mode=False)\n"
        f"heavy = {{'torch', 'transformers', 'triton', 'pandas', 'matplotlib.pyplot'}} | {scipy!r}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print('matplotlib' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, drawing = done.stdout.splitlines()[-2:]
    assert loaded == "[]"
    assert drawing == str(command == "report")


@pytest.mark.parametrize("command", ["recommend", "fit", "predict", "report", "export"])
def test_every_help_has_an_example(spectune, command):
    _, out, _ = spectune(command, "--help")
    assert f"Example: spectune {command}" in out
