"""The GPU benchmark as a whole, on the CPU and with tiny shapes: what it measures here says nothing about a GPU."""

from __future__ import annotations

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from spectune.engines import gpu_bench, gpu_sections
from spectune.engines.gpu_figures import Figure, Section, run_section
from spectune.engines.gpu_sections import count_tests

SHAPE = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
SECTIONS = [
    "environment",
    "bandwidth",
    "gpu tests",
    "plain decoding",
    "speculative round",
    "acceptance step",
    "batches",
    "transformers, dynamic cache",
    "transformers, compiled static cache",
    "sweep",
    "report",
    "transformers, assisted",
]
REPEATS = 2


def shape(folder, layers: int) -> str:
    path = folder / f"{layers}.json"
    path.write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    return f"shape:{path}"


def command(folder, *more: str):
    app = Typer()
    app.command()(gpu_bench.main)
    models = ["--target", shape(folder, 2), "--draft", shape(folder, 1), "--grown", "1:0"]
    sizes = ["--context", "24", "--tokens", "12", "--k", "2", "--repeats", str(REPEATS), "--batches", "1,3"]
    where = ["--device", "cpu", "--dtype", "float32", "--output", str(folder / "out")]
    return CliRunner().invoke(app, [*models, *sizes, *where, *more])


def read(folder) -> dict:
    text = (folder / "out" / "gpu_bench.json").read_text()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run of everything, with the decoder recording as it does on a GPU."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECTUNE_GRAPHS", "1")
        # A busy machine may take its time; that sections end in time is tested elsewhere.
        patch.setattr(gpu_bench, "run_section", lambda section, seconds: run_section(section, 3600))
        # What streams memory for its quarter of a second each is tested elsewhere.
        measure = gpu_sections.measure_copy_bandwidth
        patch.setattr(gpu_sections, "measure_copy_bandwidth", lambda d: measure(d, bytes_=1 << 20, seconds=0.0))
        result = command(folder, "--seconds", "3600")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return folder


@pytest.fixture(scope="module")
def sections(folder) -> dict[str, dict]:
    return {section["name"]: section for section in read(folder)["sections"]}


def figure(section: dict, what: str) -> dict:
    return next(f for f in section["figures"] if f["what"] == what)


def test_every_section_has_its_turn_and_only_the_gpu_tests_are_skipped_on_a_cpu(folder, sections):
    assert read(folder)["complete"]
    assert list(sections) == SECTIONS
    states = {name: (s["status"], s["reason"]) for name, s in sections.items()}
    assert states.pop("gpu tests") == ("skipped", "the tests marked gpu need a CUDA device")
    assert set(states.values()) == {("done", None)}


def test_every_figure_has_its_repeats_and_an_interval_around_its_median(sections):
    figures = [f for s in sections.values() for f in s["figures"]]
    assert len(figures) > 20
    for f in figures:
        assert f["n"] == len(f["repeats"]) >= 1
        assert f["low"] <= f["median"] <= f["high"]
        assert (f["aim"] is None) == (f["met"] is None)
    assert {f["n"] for f in sections["plain decoding"]["figures"]} == {REPEATS}


def test_aims_are_those_that_the_decoder_shall_reach(sections):
    aims = {
        ("plain decoding", "share of the copy bandwidth"): "≥ 0.8",
        ("speculative round", "round / (K draft forwards + verification)"): "≤ 1.05",
        ("acceptance step", "accept step / round"): "≤ 0.02",
        ("batches", "batch 3: recorded while measured"): "≤ 0",
        ("transformers, assisted", "spectune / transformers"): "≥ 3",
    }
    assert {(name, what): figure(sections[name], what)["aim"] for name, what in aims} == aims


def test_nothing_is_recorded_while_it_is_measured(sections):
    counts = [f["median"] for f in sections["batches"]["figures"] if "recorded" in f["what"]]
    assert counts == [0, 0]


def test_both_sides_hold_the_same_weights_and_the_grown_pair_agrees_at_every_token(sections):
    for name in ("transformers, dynamic cache", "transformers, compiled static cache"):
        assert "1 of 1 outputs are the same" in sections[name]["notes"][-1]
    # 12 tokens at K 2: ours are 1 with the prefill and 11 in 4 rounds; theirs start drafting within the prefill.
    note = sections["transformers, assisted"]["notes"][-1]
    assert "2.4 and 3" in note
    assert "1 of 1 outputs are the same" in note


def test_the_share_of_the_bandwidth_is_bytes_over_time_over_the_copy_rate(sections):
    plain = sections["plain decoding"]
    copy = next(f for f in sections["bandwidth"]["figures"] if f["what"].startswith("copy"))
    gigabytes = float(plain["notes"][0].split(": ")[1].split()[0])
    expected = [gigabytes / (ms / 1e3) / copy["median"] for ms in figure(plain, "time per step")["repeats"]]
    assert figure(plain, "share of the copy bandwidth")["repeats"] == pytest.approx(expected, rel=1e-3)


def test_the_sweep_leaves_a_run_and_its_report(folder):
    assert len(list((folder / "out" / "run" / "cells").glob("*.json"))) == 6
    assert "</html>" in (folder / "out" / "run" / "report.html").read_text()
    assert "acceptance step" in (folder / "out" / "gpu_bench.txt").read_text()


def test_a_folder_that_holds_a_benchmark_is_not_written_into(folder):
    assert "already holds" in str(command(folder).exception)


def failing(self):
    yield Figure.of("before", "", [1.0])
    raise ValueError("this section\nis broken")


def test_a_section_that_raises_is_reported_and_does_not_stop_the_others(tmp_path, monkeypatch):
    def without_module(self):
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")
        yield

    def fine(self):
        yield "fine"

    broken = [Section("broken", 5, lambda: failing(None)), Section("bare", 5, lambda: without_module(None))]
    monkeypatch.setattr(gpu_sections.Bench, "sections", lambda self: [*broken, Section("fine", 5, lambda: fine(self))])
    result = command(tmp_path)
    assert "1 of 3 sections did not finish: broken" in str(result.exception)
    first, second, third = read(tmp_path)["sections"]
    assert (first["status"], first["reason"]) == ("failed", "ValueError: this section is broken")
    assert [f["what"] for f in first["figures"]] == ["before"]
    assert (second["status"], second["reason"]) == ("skipped", "psutil is not installed")
    assert (third["status"], third["notes"]) == ("done", ["fine"])


def test_what_was_found_before_a_kill_is_on_disk(tmp_path, monkeypatch):
    def killed():
        raise KeyboardInterrupt
        yield

    parts = [Section("first", 5, lambda: iter([Figure.of("x", "s", [1.0])])), Section("second", 5, killed)]
    monkeypatch.setattr(gpu_sections.Bench, "sections", lambda self: parts)
    command(tmp_path)
    report = read(tmp_path)
    assert not report["complete"]
    assert [s["name"] for s in report["sections"]] == ["first"]


def test_counts_are_read_from_the_last_line_of_pytest():
    assert count_tests("...\n1 failed, 7 passed, 2 skipped, 1 error in 3.10s\n") == {
        "failed": 1,
        "passed": 7,
        "skipped": 2,
        "error": 1,
    }
    assert count_tests("") == {}
