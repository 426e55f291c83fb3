"""`spectune train` from the command line to folders that drafters are built from."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import load_tiny
from decoding_helpers import decode, drafter_of, random_prompts, reference, tokens_of
from safetensors.torch import load_file
from training_helpers import save_target
from typer.testing import CliRunner

from spectune.cli.app import app
from spectune.errors import SpectuneError, UsageError
from spectune.heads.eagle_layouts import load_eagle
from spectune.training import progress
from spectune.training.gathering import gather_rows
from spectune.training.options import TrainOptions
from spectune.training.progress import Silent
from spectune.training.prompts import expand, training_book

TRAINED = ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Text and states are shared by all trainings here, as they are for a user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def words(method: str, folder: Path, output: Path, *more: str) -> list[str]:
    size = [] if method == "layer-skip" else ["--epochs", "1"]
    return ["train", method, "--target", str(folder), "-o", str(output), "--tokens", "1500", *size, *more]


def train(method: str, folder: Path, output: Path, *more: str):
    return CliRunner().invoke(app, words(method, folder, output, *more), catch_exceptions=True)


def fails(*arguments: str) -> SpectuneError:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(result.exception, SpectuneError), result.output
    return result.exception


# ------------------------------------------------------------------------------------------------- wrong use is refused


HELP = """
import sys
from spectune.cli.app import app
try:
    app(["train", "--help"])
except SystemExit:
    sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""


def test_help_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--draft-vocab" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["eagl"], "did you mean eagle"),
        (["eagle", "--layers", "2"], "--layers is not for eagle"),
        (["eagle", "--mix", "code=0.5,poems=0.5"], "no suite 'poems' to train on"),
        (["eagle", "--mix", "code"], "--mix takes SUITE=SHARE"),
        (["eagle", "--mix", "code=1", "--text", "mine.txt"], "--mix is of our own prompts"),
        (["medusa", "--start", "demo"], "--start is not for medusa"),
        (["eagle3", "--start", "demo", "--draft-vocab", "96"], "--draft-vocab is for a new head"),
        (["layer-skip", "--draft-vocab", "10"], "--draft-vocab is not for layer-skip"),
        (["draft", "--draft-vocab", "64"], "--compact"),
        (["draft", "--tokens", "0"], "--tokens must be 1 or more"),
        (["draft", "--minutes", "0"], "--minutes must be more than 0"),
        (["draft", "--minutes", "inf"], "--minutes must be more than 0 and finite"),
        (["draft", "--learning-rate", "nan"], "--learning-rate must be more than 0"),
        (["draft", "--threads", "1000000000"], "--threads must be at most"),
        (["medusa", "--heads", "1000000000"], "--heads must be at most"),
        (["draft", "--seed", str(1 << 64)], "--seed must fit 64 bits"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(arguments, problem, tmp_path):
    error = fails(*arguments, "--target", str(tmp_path / "nowhere"), "-o", str(tmp_path / "o"))
    assert problem in str(error)
    assert error.exit_code == 2
    assert not (tmp_path / "o").exists()


def test_sizes_that_do_not_fit_the_target_are_refused_before_any_text_is_written(folder, tmp_path):
    for more, problem in (
        (["draft", "--layers", "2"], "a draft of 2 layers"),
        (["exit", "--exit-layer", "2"], "an exit behind 2 layers"),
        (["exit", "--draft-vocab", "2"], "does not fit"),
        (["exit", "--draft-vocab", "1000"], "does not fit"),
    ):
        error = fails(*more, "--target", str(folder), "-o", str(tmp_path / "o"), "--tokens", "1000000000")
        assert problem in str(error)


def test_a_folder_with_other_things_or_an_unfinished_training_is_not_overwritten(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "is not empty" in str(fails("exit", "--target", str(folder), "-o", str(tmp_path / "full")))
    assert "is not empty" in str(fails("exit", "--target", str(folder), "-o", str(tmp_path / "full"), "--resume"))
    assert "is a file" in str(fails("exit", "-o", str(tmp_path / "full" / "thesis.txt")))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    assert "--resume" in str(fails("exit", "--target", str(folder), "-o", str(tmp_path / "begun")))


@pytest.mark.parametrize("file", ["run.json", "training.json", "checkpoint.pt", "search.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_file_of_an_earlier_session_is_named(folder, tmp_path, file, content):
    method = "layer-skip" if file == "search.json" else "exit"
    options = TrainOptions(method, str(folder), tokens=1500, epochs=None if method == "layer-skip" else 1)
    indices = [row.index for row in gather_rows(options, load_tiny(folder), Silent())]
    (tmp_path / "run.json").write_text(json.dumps({"options": asdict(options), "rows": indices}))
    (tmp_path / file).write_text(content)
    error = fails(*words(method, folder, tmp_path, "--resume")[1:])
    assert str(tmp_path / file) in str(error)
    assert error.exit_code == 2


# -------------------------------------------------------------------------------------------------------- every method


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_trains_is_documented_in_its_folder_and_drafts_losslessly(method, folder, tmp_path):
    output = tmp_path / method
    more = ("--draft-vocab", "96", *(("--compact",) if method == "draft" else ()))
    result = train(method, folder, output, *more, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == json.loads((output / "training.json").read_text())
    assert said["options"]["method"] == method
    assert said["command"][0] == "spectune"
    assert said["draft_vocabulary"]["size"] == 96
    assert 0.5 < said["draft_vocabulary"]["held_out_coverage"] <= 1
    assert said["tokens_seen"] == said["text"]["tokens"] >= 1200
    assert said["text"]["held_out_tokens"] > 0
    assert len(said["held_out"]["acceptance"]) == len(said["held_out"]["overlap"]) >= 4
    assert said["curve"][-1]["acceptance"] == said["held_out"]["acceptance"]
    assert len(said["losses"]) > 3
    assert not (output / "checkpoint.pt").exists()
    target = load_tiny(folder)
    name = {"draft": str(output), "exit": f"early-exit:{output}"}.get(method, f"{method}:{output}")
    prompts = random_prompts(3)
    run = decode(target, drafter_of(target, name), prompts, batch=2, k=3)
    assert tokens_of(run) == [reference(target, p, 24) for p in prompts]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_training_goes_on_from_a_trained_head(method, folder, tmp_path):
    first, still, further = tmp_path / "first", tmp_path / "still", tmp_path / "further"
    assert train(method, folder, first, "--draft-vocab", "96", "--compact").exit_code == 0
    more = ("--start", str(first), "--seed", "2", "--tokens", "3000")
    for output, rate in ((still, "1e-12"), (further, "1e-3")):
        result = train(method, folder, output, *more, "--learning-rate", rate)
        assert result.exit_code == 0, result.output
    record = json.loads((first / "training.json").read_text())
    for output in (still, further):
        said = json.loads((output / "training.json").read_text())
        assert said["options"]["start"] == str(first)
        assert said["start"] == {name: record[name] for name in said["start"]}
        assert {"command", "tokens_seen", "text", "held_out"} <= said["start"].keys()
        assert said["draft_vocabulary"]["size"] == 96
        assert said["text"]["digest"] != record["text"]["digest"]
    target = load_tiny(folder)
    began, same, moved = (load_eagle(path, target.model.layers_count) for path in (first, still, further))
    assert torch.equal(same.draft_ids, began.draft_ids)
    assert torch.equal(moved.draft_ids, began.draft_ids)
    for name, weight in began.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(moved.state_dict()[name], weight, rtol=1e-3, atol=1e-5), name


def test_a_head_to_go_on_from_that_does_not_fit_is_refused_before_any_text_is_written(folder, tmp_path):
    assert train("eagle", folder, tmp_path / "eagle", "--draft-vocab", "96").exit_code == 0
    assert train("medusa", folder, tmp_path / "medusa", "--draft-vocab", "96").exit_code == 0
    for start, problem in (
        (str(tmp_path / "eagle"), "holds an eagle head (go on with: spectune train eagle --start"),
        (str(tmp_path / "medusa"), "holds no EAGLE head but a medusa draft"),
        (str(tmp_path / "nowhere"), "no folder"),
        ("demo", "does not fit a target of 2 layers"),
    ):
        more = ("--start", start, "--target", str(folder), "-o", str(tmp_path / "o"), "--tokens", "1000000000")
        error = fails("eagle3", *more)
        assert problem in str(error), error
        assert error.exit_code == 2


def test_the_record_of_a_head_is_not_needed_to_go_on_from_it(folder, tmp_path):
    first, further = tmp_path / "first", tmp_path / "further"
    assert train("eagle3", folder, first, "--draft-vocab", "96").exit_code == 0
    for damage in ("{", "[]", None):
        (first / "training.json").unlink(missing_ok=True)
        if damage is not None:
            (first / "training.json").write_text(damage)
        output = further / str(damage is None) / str(damage == "[]")
        assert train("eagle3", folder, output, "--start", str(first)).exit_code == 0
        said = json.loads((output / "training.json").read_text())
        assert "start" not in said
        assert said["options"]["start"] == str(first)


def test_a_mix_decides_what_the_target_is_asked():
    asked = list(islice(expand(training_book("code=3,math=1")), 40))
    assert Counter(prompt.category for prompt in asked) == {"code": 30, "math": 10}
    assert training_book("code=3,math=1").digest != training_book().digest


def test_a_mix_given_to_a_training_is_what_its_text_is_made_of(folder):
    rows = gather_rows(TrainOptions("eagle", str(folder), tokens=1500, mix="math=1"), load_tiny(folder), Silent())
    assert len(rows) > 3
    assert {row.id.rpartition("-")[0] for row in rows} == {"math"}


def test_others_may_read_a_trained_head_as_they_may_any_new_file(folder, tmp_path):
    assert train("medusa", folder, tmp_path / "medusa", "--draft-vocab", "96").exit_code == 0
    (tmp_path / "plain").touch()
    assert (tmp_path / "medusa" / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_search_for_layers_writes_a_draft(folder, tmp_path):
    output = tmp_path / "skip"
    result = train("layer-skip", folder, output, "--minutes", "0.05")
    assert result.exit_code == 0, result.output
    said = json.loads((output / "training.json").read_text())
    assert json.loads((output / "config.json").read_text())["skip"] == said["skip"]
    assert "plain decoding" in result.stdout
    target = load_tiny(folder)
    prompts = random_prompts(2)
    run = decode(target, drafter_of(target, f"layer-skip:{output}"), prompts, batch=2, k=3)
    assert tokens_of(run) == [reference(target, p, 24) for p in prompts]


def test_a_full_draft_has_the_tokenizer_beside_it_and_a_second_call_only_reports(folder, tmp_path):
    output = tmp_path / "draft"
    assert train("draft", folder, output).exit_code == 0
    assert (output / "tokenizer.json").exists()
    stamp = (output / "model.safetensors").stat().st_mtime_ns
    again = train("draft", folder, output, "--resume")
    assert again.exit_code == 0
    assert "acceptance length" in again.stdout
    assert (output / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_finished_training_is_not_taken_for_another(folder, tmp_path):
    output = tmp_path / "o"
    assert train("exit", folder, output).exit_code == 0
    for error in (
        fails(*words("medusa", folder, output, "--resume")[1:]),
        fails(*words("exit", folder, output, "--resume", "--seed", "5")[1:]),
    ):
        assert "was begun with" in str(error)


def test_more_heads_than_a_short_text_has_tokens_learn_what_there_is(folder, tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "response": "abcde"}) + "\n" for i in range(60))
    )
    result = train("medusa", folder, tmp_path / "o", "--text", str(tmp_path / "t.jsonl"), "--heads", "12")
    assert result.exit_code == 0, result.exception
    assert len(json.loads((tmp_path / "o" / "training.json").read_text())["held_out"]["acceptance"]) == 12


def test_a_file_of_texts_needs_no_answers_of_the_target(folder, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"question {i}", "completion": f" answer number {i}."}) for i in range(80))
    )
    output = tmp_path / "o"
    result = train("exit", folder, output, "--text", str(path), "--json")
    assert result.exit_code == 0, result.output
    text = json.loads(result.stdout)["text"]
    assert text["texts"] + text["held_out_texts"] == 80
    assert str(fails("exit", "--text", str(tmp_path / "no.jsonl"), "--target", str(folder), "-o", str(tmp_path / "p")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_lines_elsewhere_and_nothing_if_quiet(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 1000.0)
    said = {}
    for stream, quiet in ((Terminal(), False), (io.StringIO(), False), (io.StringIO(), True)):
        listener = progress.make_listener(quiet=quiet, stream=stream)
        listener.note("a note")
        for done in (0.0, 0.5, 1.0):
            listener.advance("training", done, f"loss {done}", 100 * (1 - done))
        listener.end()
        said[type(listener).__name__] = stream.getvalue()
    assert said["Silent"] == ""
    assert said["Lines"].splitlines() == [
        "a note",
        "training: 0 %, loss 0.0 (about 2 min left)",
        "training: 100 %, loss 1.0",
    ]
    assert "a note" in said["Bar"]
    assert "100%" in said["Bar"]


# -------------------------------------------------------------------------------------------------------- interruptions

KILLED = """
import os, signal, sys
from functools import partial
import torch
torch.set_num_threads(1)
from spectune.training import loop, session
session.LoopSettings = partial(loop.LoopSettings, checkpoint_seconds=0.0)
save, saves = loop.Loop.save, 0
def count(self):
    global saves
    save(self)
    saves += 1
    if saves == 5:
        os.kill(os.getpid(), signal.SIGKILL)
loop.Loop.save = count
from spectune.cli.app import app
app(sys.argv[1:])
"""


def test_a_training_killed_with_kill_9_and_resumed_ends_like_one_that_was_not(folder, tmp_path):
    whole = train("medusa", folder, tmp_path / "whole", "--draft-vocab", "96")
    assert whole.exit_code == 0, whole.output
    output = tmp_path / "killed"
    arguments = words("medusa", folder, output, "--draft-vocab", "96")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert {path.name for path in output.iterdir()} >= {"run.json", "checkpoint.pt"}
    resumed = train("medusa", folder, output, "--draft-vocab", "96", "--resume")
    assert resumed.exit_code == 0, resumed.output
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0)
    kept = ("tokens_seen", "held_out", "curve", "losses", "text")
    reports = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "killed")]
    assert [reports[0][key] for key in kept] == [reports[1][key] for key in kept]


@pytest.mark.parametrize(
    ("phase", "number", "endless"),
    [
        ("text by the target: ", signal.SIGINT, "--tokens"),
        ("training: ", signal.SIGINT, "--epochs"),
        ("training: ", signal.SIGTERM, "--epochs"),
    ],
)
def test_ctrl_c_and_sigterm_keep_what_is_done_and_say_how_to_go_on(phase, number, endless, folder, tmp_path):
    output = tmp_path / "o"
    arguments = words("exit", folder, output)
    arguments[arguments.index(endless) + 1] = "100000"
    process = subprocess.Popen(
        [sys.executable, "-m", "spectune", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(phase):
            break
    time.sleep(0.2)
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait() == 130, rest
    assert "--resume" in rest
    assert "Traceback" not in rest
    assert (output / "checkpoint.pt").exists() == (output / "run.json").exists() == (phase == "training: ")


def test_a_resumed_training_takes_the_texts_it_began_with(folder, tmp_path):
    target, options = load_tiny(folder), TrainOptions("exit", tokens=500)
    first = gather_rows(options, target, Silent())
    assert gather_rows(options, target, Silent(), [first[2].index, first[0].index]) == [first[2], first[0]]
    with pytest.raises(UsageError, match="1 of the texts that this training began with are gone"):
        gather_rows(options, target, Silent(), [first[0].index, 10**9])


def test_a_training_with_other_settings_or_texts_is_not_mixed_into_an_old_one(folder, tmp_path):
    output = tmp_path / "o"
    output.mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words("exit", folder, output)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL
    result = train("exit", folder, output, "--resume", "--seed", "5")
    assert isinstance(result.exception, UsageError)
    assert "was begun with --seed 0, not 5" in str(result.exception)
    begun = json.loads((output / "run.json").read_text())
    (output / "run.json").write_text(json.dumps(begun | {"rows": begun["rows"][:-3]}))
    result = train("exit", folder, output, "--resume")
    assert isinstance(result.exception, UsageError)
    assert "other data or settings" in str(result.exception)


def test_a_checkpoint_belongs_to_the_head_that_its_training_went_on_from():
    starts = (None, "first", "second")
    assert len({TrainOptions("eagle", start=start).fingerprint("target", "texts") for start in starts}) == 3
