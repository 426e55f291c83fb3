"""`spectune import`, and `recommend` and `fit` on what it wrote, as a user runs them."""

from __future__ import annotations

import json

import pytest
from synthetic_run import strict_json

FAST = {
    "completed": 20,
    "max_concurrency": 8,
    "total_output_tokens": 300,
    "output_throughput": 150.0,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 400,
    "spec_decode_accepted_tokens": 180,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.3, 0.2],
}
PLAIN = {"completed": 20, "max_concurrency": 8, "total_output_tokens": 300, "output_throughput": 100.0}


@pytest.fixture(autouse=True)
def _files(monkeypatch, tmp_path):
    """Two results in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast.json").write_text(json.dumps(FAST))
    (tmp_path / "plain.json").write_text(json.dumps(PLAIN))


def test_json_is_strict_alone_on_stdout_and_what_the_file_holds(spectune, tmp_path):
    code, out, err = spectune("import", "fast.json", "plain.json", "--k", 0, "-o", "server", "--json")
    assert (code, err) == (0, "")
    document = strict_json(out)
    assert strict_json((tmp_path / "server" / "imported.json").read_text()) == document
    assert [p["k"] for p in document["points"]] == [4, 0]


def test_recommend_says_what_is_known_and_that_it_is_no_verdict(spectune):
    spectune("import", "fast.json", "plain.json", "--k", 0, "-o", "server")
    code, out, _ = spectune("recommend", "server", "--json")
    document = strict_json(out)
    assert code == 0
    assert document["best"][0]["speedup"] == pytest.approx(1.5)
    assert document["verdict"] == "CAN'T TELL"
    _, shown, _ = spectune("recommend", "server")
    assert "K 4: 1.50 times plain decoding  [CAN'T TELL]" in shown
    assert "no interval" in shown


def test_fit_says_the_acceptance_and_leaves_times_open(spectune):
    spectune("import", "fast.json", "-o", "server")
    document = strict_json(spectune("fit", "server", "--json")[1])
    assert document["models"] is None
    assert document["points"][0]["iid_rate"] == pytest.approx(0.70, abs=0.1)
    code, shown, _ = spectune("fit", "server")
    assert code == 0
    assert "0.80 0.62 0.60 0.67" in shown
    assert "n/a" in shown


def test_what_needs_a_run_is_refused_on_imported_results(spectune):
    spectune("import", "fast.json", "-o", "server")
    code, _, err = spectune("recommend", "server", "--for", "vllm")
    assert (code, "--for needs a run" in err) == (2, True)
    for option in (["--objective", "latency"], ["--mix", "code=1"], ["--objective", "goodput", "--slo", "tpot=1s"]):
        code, _, err = spectune("recommend", "server", *option)
        assert (code, f"{option[0]} needs a run" in err) == (2, True)
    code, _, err = spectune("fit", "server", "--precision", "2%")
    assert (code, "--precision needs a run" in err) == (2, True)


def test_wrong_use_is_one_line_with_the_fix_and_exit_code_2(spectune, tmp_path):
    code, _, err = spectune("import", "fast.json", "-o", "x", "--bonus", "perhaps")
    assert (code, "included, excluded" in err) == (2, True)
    code, _, err = spectune("import", "absent.json", "-o", "x")
    assert (code, "absent.json: No such file" in err) == (2, True)
    assert not (tmp_path / "x").exists()
    spectune("import", "fast.json", "-o", "server")
    code, _, err = spectune("import", "fast.json", "-o", "server")
    assert (code, "server exists" in err) == (2, True)


def test_a_damaged_file_is_refused_with_its_name(spectune, tmp_path):
    spectune("import", "fast.json", "-o", "server")
    file = tmp_path / "server" / "imported.json"
    file.write_text(file.read_text().replace('"k": 4', '"k": -4'))
    code, _, err = spectune("recommend", "server")
    assert (code, "imported.json cannot be read: points.0.k" in err) == (2, True)
