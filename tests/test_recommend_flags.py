"""Settings for the engines: names of the stated versions, quoted so that a shell cannot misread them."""

from __future__ import annotations

import ast
import json
import shlex

import pytest

from spectune.recommending.flags import ENGINES, NGRAM_MAX, NGRAM_MIN, flags
from spectune.speedup.profile import Config

VLLM_KEYS = {
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "draft_sample_method",
    "rejection_sample_method",
}
HOSTILE = """it's "a" $(model); rm -rf / --x"""


def text(engine, drafter, k=4, rule="greedy", temperature=0.0):
    (found,) = flags(Config(drafter, rule, k), temperature=temperature, engine=engine)
    return found.text


def vllm(drafter, **options):
    words = shlex.split(text("vllm", drafter, **options))
    assert words[0] == "--speculative-config"
    assert len(words) == 2
    settings = json.loads(words[1])
    assert set(settings) <= VLLM_KEYS
    return settings


@pytest.mark.parametrize("name", ["org/model", HOSTILE])
def test_vllm_takes_one_json_value(name):
    assert vllm(name) == {"method": "draft_model", "model": name, "num_speculative_tokens": 4}


def test_vllm_ngram_lengths_follow_the_drafter():
    assert vllm("ngram:2-5", k=3) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    assert vllm("ngram")["prompt_lookup_max"] == NGRAM_MAX


def test_vllm_samples_the_draft_where_the_measured_rule_did():
    assert vllm("m", rule="speculative", temperature=0.8)["draft_sample_method"] == "probabilistic"
    assert vllm("m", rule="block", temperature=0.8)["rejection_sample_method"] == "block"


def test_the_default_ngram_lengths_are_those_of_the_decoder():
    from spectune.decoding import ngram

    assert (NGRAM_MIN, NGRAM_MAX) == (ngram.MIN_NGRAM, ngram.MAX_NGRAM)


def test_sglang_counts_the_root_of_the_draft():
    words = shlex.split(text("sglang", HOSTILE))
    assert words[words.index("--speculative-num-steps") + 1] == "4"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"
    assert words[words.index("--speculative-draft-model-path") + 1] == HOSTILE


def test_llama_cpp_names_the_kind_of_speculation():
    words = shlex.split(text("llama.cpp", HOSTILE))
    assert words == [
        "--spec-type",
        "draft-simple",
        "--spec-draft-model",
        HOSTILE,
        "--spec-draft-n-max",
        "4",
    ]
    assert "ngram-simple" in text("llama.cpp", "ngram")


def test_tensorrt_llm_quotes_the_model_as_yaml_does():
    line = next(x for x in text("tensorrt-llm", HOSTILE).splitlines() if "speculative_model_dir" in x)
    assert json.loads(line.partition(": ")[2]) == HOSTILE


@pytest.mark.parametrize("drafter", [HOSTILE, "ngram", "early-exit:8"])
def test_transformers_text_is_python(drafter):
    assert ast.parse(text("transformers", drafter))


def test_removed_names_are_never_written():
    for drafter in ("org/model", "ngram", "early-exit:8"):
        for flag in flags(Config(drafter, "greedy", 4)):
            for old in (
                "--speculative-model",
                "--num-speculative-tokens",
                "--draft-max",
                "disable_by_batch_size",
            ):
                assert old not in (flag.text or "").split()


def test_every_text_states_its_version():
    assert len(flags(Config("m", "greedy", 4))) == len(ENGINES)
    assert all(any(c.isdigit() for c in f.version) for f in flags(Config("m", "greedy", 4)))


def test_engines_without_the_method_say_so():
    found = {f.engine: f for f in flags(Config("early-exit:8", "greedy", 4))}
    assert "assistant_early_exit=8" in found["transformers"].text
    for engine in set(ENGINES) - {"transformers"}:
        assert found[engine].text is None
        assert "no early-exit method" in found[engine].notes[0]
    assert all(f.text is None for f in flags(Config("layer-skip:1-2", "greedy", 4)))


def test_off_leaves_speculation_out():
    found = {f.engine: f for f in flags(None)}
    assert found["vllm"].text is None
    assert "out" in found["vllm"].notes[0]
    assert not any("speculative" in (f.text or "") for f in found.values())


@pytest.mark.parametrize(
    ("drafter", "method"),
    [
        ("eagle:a/b", "eagle"),
        ("eagle3:a/b", "eagle3"),
        ("medusa:a/b", "medusa"),
        ("mlp-speculator:a/b", "mlp_speculator"),
    ],
)
def test_vllm_loads_trained_heads_by_their_method(drafter, method):
    assert vllm(drafter) == {"method": method, "model": "a/b", "num_speculative_tokens": 4}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "drafter", ["blockwise:a/b", "staged:ngram>a/b", "tree:medusa:a/b", "sequoia:a/b", "layer-skip:3"]
)
def test_methods_that_an_engine_lacks_give_a_reason_and_no_flags(engine, drafter):
    (found,) = flags(Config(drafter, "greedy", 4), engine=engine)
    assert found.text is None
    assert "has no" in found.notes[0]


def test_sglang_gets_the_size_of_an_eagle_tree():
    words = shlex.split(text("sglang", "tree:eagle3:a/b", k=16))
    settings = dict(zip(words[::2], words[1::2], strict=True))
    assert settings["--speculative-algorithm"] == "EAGLE3"
    assert settings["--speculative-draft-model-path"] == "a/b"
    assert (settings["--speculative-num-steps"], settings["--speculative-eagle-topk"]) == ("6", "4")
    assert settings["--speculative-num-draft-tokens"] == "17"


def test_shipped_drafts_and_lossy_rules_are_said_to_be_what_they_are():
    (found,) = flags(Config("eagle3:demo", "typical", 4), temperature=0.8, engine="vllm")
    assert any("typical acceptance" in note for note in found.notes)
    assert any("spectune train" in note for note in found.notes)
    (found,) = flags(Config("eagle3:mine", "speculative", 4), temperature=0.8, engine="vllm")
    assert found.notes == ()
