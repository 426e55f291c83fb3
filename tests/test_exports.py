"""Exports: names of the stated versions only, quoted so that a shell cannot misread them."""

from __future__ import annotations

import ast
import json
import shlex

import pytest
import synthetic_run
import yaml

from spectune.decoding.tree_size import default_growth
from spectune.recommending.choice import recommend
from spectune.recommending.exports import llama_cpp, sglang, tensorrt_llm, transformers, vllm
from spectune.recommending.exports.engines import exports
from spectune.recommending.exports.export import ENGINES, Wanted, allowed
from spectune.recommending.exports.measured import MeasuredAcceptance, measured_acceptance
from spectune.recommending.exports.names import NGRAM_MAX, NGRAM_MIN
from spectune.recommending.exports.schedule import batch_schedule
from spectune.speedup.profile import Config, profiles
from spectune.speedup.run import load_run

HOSTILE = """it's "a" $(model); rm -rf / --x"""
SCHEDULE = ((1, 3, 6), (4, 8, 2), (9, 32, 0))
ACCEPTANCE = MeasuredAcceptance(3.24, (0.9, 0.7, 0.4, 0.24))
DRAFTERS = ("org/model", HOSTILE, "ngram", "ngram:2-5", "eagle:a/b", "eagle3:a/b", "medusa:a/b", "mlp-speculator:a/b",
            "early-exit:8", "tree:eagle3:a/b", "eagle2:a/b")  # fmt: skip
RULES = (("greedy", 0.0), ("speculative", 0.8), ("block", 0.8), ("match", 0.8))


def export(engine, drafter, k=4, rule="greedy", temperature=0.0, target="org/target", **options):
    (found,) = exports(Wanted(Config(drafter, rule, k), target, temperature, **options), engine=engine)
    return found


def texts(found):
    variants = [v for v in (found.schedule, found.synthetic) if v is not None]
    return [text for text in (found.text, *(v.text for v in variants)) if text is not None]


def every_text(engine):
    """Each text of each combination that the server has."""
    for drafter in DRAFTERS:
        for rule, temperature in RULES:
            options = {"schedule": SCHEDULE, "acceptance": ACCEPTANCE, "same_vocabulary": False, "target": HOSTILE}
            yield from texts(export(engine, drafter, rule=rule, temperature=temperature, **options))


def vllm_settings(text, target=HOSTILE):
    words = shlex.split(text)
    assert words[:4] == ["vllm", "serve", target, "--speculative-config"]
    (value,) = words[4:]
    return json.loads(value)


def options_of(words, flags, switches=()):
    """Words as flags with one value each; switches have none."""
    found, left = {}, list(words)
    while left:
        name = left.pop(0)
        assert name in flags
        found[name] = None if name in switches else left.pop(0)
    return found


def without_environment(words, names):
    if words[0] != "env":
        return {}, words
    pairs = [w.split("=", 1) for w in words[1:] if "=" in w and w.split("=", 1)[0] in names]
    return dict(pairs), words[1 + len(pairs) :]


def test_every_vllm_command_is_one_json_value_of_allowed_keys():
    found = [vllm_settings(text) for text in every_text("vllm")]
    assert len(found) > 60
    for settings in found:
        assert set(settings) <= vllm.KEYS
        assert settings["method"] in vllm.METHODS
        assert settings["num_speculative_tokens"] > 0


def test_vllm_itself_takes_every_command(tmp_path, tiny_folder):
    config = pytest.importorskip("vllm.config", reason="vLLM is not installed", exc_type=ImportError)
    target = config.ModelConfig(model=str(tiny_folder))
    for text in every_text("vllm"):
        settings = vllm_settings(text)
        if settings["method"] != "draft_model" and "model" in settings:
            continue  # needs the head's own files
        if "model" in settings:
            settings["model"] = str(tiny_folder)
        config.SpeculativeConfig(target_model_config=target, target_parallel_config=config.ParallelConfig(), **settings)


def test_every_sglang_command_has_allowed_flags_and_values():
    for text in every_text("sglang"):
        *writing, command = text.split("\n")
        variables, words = without_environment(shlex.split(command), sglang.VARIABLES)
        assert set(variables) in (set(), set(sglang.VARIABLES))
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        options = options_of(words[3:], sglang.FLAGS, switches=("--speculative-adaptive",))
        assert options["--model-path"] == HOSTILE
        assert options["--speculative-algorithm"] in sglang.ALGORITHMS
        if writing:
            name, form, content, arrow, file = shlex.split(writing[0])
            assert (name, form, arrow) == ("printf", "%s\\n", ">")
            assert options["--speculative-adaptive-config"] == file
            assert all(key.isdigit() and set(own) <= sglang.ADAPTIVE_KEYS for key, own in json.loads(content).items())


def test_every_tensorrt_llm_file_is_yaml_of_allowed_keys():
    for text in every_text("tensorrt-llm"):
        if text.startswith("env "):
            variables, words = without_environment(shlex.split(text), {tensorrt_llm.VARIABLE})
            assert words == ["trtllm-serve", HOSTILE, "--config", tensorrt_llm.CONFIG_FILE]
            assert float(variables[tensorrt_llm.VARIABLE]) == pytest.approx(ACCEPTANCE.length - 1)
            continue
        document = yaml.safe_load(text)
        assert set(document) == tensorrt_llm.TOP_KEYS
        assert set(document["speculative_config"]) <= tensorrt_llm.KEYS
        assert document["speculative_config"]["decoding_type"] in tensorrt_llm.TYPES


def test_every_llama_cpp_command_has_allowed_flags():
    for text in every_text("llama.cpp"):
        words = shlex.split(text)
        assert words[0] == "llama-server"
        options = options_of(words[1:], llama_cpp.FLAGS)
        assert options["--model"] == HOSTILE
        assert options["--spec-type"] in llama_cpp.TYPES


def test_every_transformers_text_is_python_with_allowed_arguments():
    for text in every_text("transformers"):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            assert {word.arg for word in call.keywords if word.arg} <= transformers.ARGUMENTS


def test_a_key_that_the_version_lacks_is_never_written():
    with pytest.raises(KeyError, match="disable_by_batch_size"):
        allowed({"disable_by_batch_size": 8}, vllm.KEYS)


def test_removed_names_are_never_written():
    removed = {"--speculative-model", "--num-speculative-tokens", "--draft-max", "disable_by_batch_size"}
    for engine in ENGINES:
        for text in every_text(engine):
            assert not removed & {w.strip('":') for line in text.splitlines() for w in line.split()}


@pytest.mark.parametrize("name", ["org/model", HOSTILE])
def test_names_reach_the_servers_as_they_are(name):
    assert vllm_settings(export("vllm", name).text, "org/target") == {
        "method": "draft_model",
        "model": name,
        "num_speculative_tokens": 4,
    }
    words = shlex.split(export("sglang", name).text)
    assert words[words.index("--speculative-draft-model-path") + 1] == name
    words = shlex.split(export("llama.cpp", name).text)
    assert words[words.index("--spec-draft-model") + 1] == name
    document = yaml.safe_load(export("tensorrt-llm", name).text)
    assert document["speculative_config"]["speculative_model_dir"] == name


def test_vllm_ngram_lengths_follow_the_drafter():
    settings = vllm_settings(export("vllm", "ngram:2-5", k=3).text, "org/target")
    assert (settings["prompt_lookup_min"], settings["prompt_lookup_max"]) == (2, 5)
    assert vllm_settings(export("vllm", "ngram").text, "org/target")["prompt_lookup_max"] == NGRAM_MAX


def test_vllm_samples_the_draft_where_the_measured_rule_did():
    sampled = export("vllm", "m", rule="speculative", temperature=0.8).text
    assert vllm_settings(sampled, "org/target")["draft_sample_method"] == "probabilistic"
    block = export("vllm", "m", rule="block", temperature=0.8).text
    assert vllm_settings(block, "org/target")["rejection_sample_method"] == "block"


def test_the_default_ngram_lengths_are_those_of_the_decoder():
    from spectune.decoding import ngram

    assert (NGRAM_MIN, NGRAM_MAX) == (ngram.MIN_NGRAM, ngram.MAX_NGRAM)


def test_sglang_counts_the_root_of_the_draft():
    words = shlex.split(export("sglang", "m").text)
    assert words[words.index("--speculative-num-steps") + 1] == "4"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"


def test_sglang_gets_the_size_of_an_eagle_tree():
    words = shlex.split(export("sglang", "tree:eagle3:a/b", k=16).text)
    settings = options_of(words[3:], sglang.FLAGS)
    assert settings["--speculative-algorithm"] == "EAGLE3"
    assert settings["--speculative-draft-model-path"] == "a/b"
    size = default_growth(16)
    assert settings["--speculative-num-steps"] == str(size.depth) == "6"
    assert settings["--speculative-eagle-topk"] == str(size.width) == "4"
    assert settings["--speculative-num-draft-tokens"] == "17"


def test_llama_cpp_names_the_kind_of_speculation_and_the_older_spelling():
    found = export("llama.cpp", HOSTILE)
    assert "--spec-type draft-simple" in found.text
    (older,) = [note for note in found.notes if "--draft-max" in note]
    words = shlex.split(older.partition(": ")[2])
    assert set(words[1::2]) <= llama_cpp.OLDER_FLAGS
    assert HOSTILE in words
    assert "ngram-simple" in export("llama.cpp", "ngram").text


def test_the_schedule_reserves_its_largest_k_and_the_static_k_stays_first():
    found = export("vllm", "eagle3:a/b", k=4, schedule=SCHEDULE)
    assert vllm_settings(found.text, "org/target")["num_speculative_tokens"] == 4
    settings = vllm_settings(found.schedule.text, "org/target")
    assert settings["num_speculative_tokens"] == 6
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 3, 6], [4, 8, 2], [9, 32, 0]]
    assert any("vllm#49548" in note for note in found.schedule.notes)
    positive = export("vllm", "eagle3:a/b", schedule=((1, 3, 4), (4, 8, 2))).schedule
    assert not any("vllm#49548" in note for note in positive.notes)


def test_sglang_adapts_eagle_chains_only():
    assert export("sglang", "ngram", schedule=SCHEDULE).schedule.text is None
    assert export("sglang", "tree:eagle3:a/b", schedule=SCHEDULE).schedule.text is None
    first = export("sglang", "eagle3:a/b", schedule=SCHEDULE).schedule.text.split("\n")[0]
    content = json.loads(shlex.split(first)[2])
    assert content == {"1": {"candidate_steps": [6]}, "4": {"candidate_steps": [2]}, "9": {"candidate_steps": [0]}}


def test_tensorrt_llm_schedules_by_the_largest_batch_of_a_range():
    document = yaml.safe_load(export("tensorrt-llm", "m", schedule=SCHEDULE).schedule.text)["speculative_config"]
    assert document["max_draft_len"] == 6
    assert document["draft_len_schedule"] == {3: 6, 8: 2}
    rising = export("tensorrt-llm", "m", schedule=((1, 3, 2), (4, 8, 6))).schedule
    assert rising.text is None


def test_forced_acceptance_says_one_length_in_every_servers_words():
    found = {e.engine: e.synthetic for e in exports(Wanted(Config("m", "greedy", 4), "t", acceptance=ACCEPTANCE))}
    settings = vllm_settings(found["vllm"].text, "t")
    assert settings["rejection_sample_method"] == "synthetic"
    assert 1 + sum(settings["synthetic_acceptance_rates"]) == pytest.approx(ACCEPTANCE.length)
    assert "SGLANG_SIMULATE_ACC_LEN=3.24" in shlex.split(found["sglang"].text)
    assert f"{tensorrt_llm.VARIABLE}=2.24" in shlex.split(found["tensorrt-llm"].text)
    words = shlex.split(found["llama.cpp"].text)
    assert words[words.index("--spec-synth-rates") + 1] == "0.9,0.7,0.4,0.24"
    assert found["transformers"].text is None


def test_known_faults_carry_the_number_of_their_thread():
    for engine in ENGINES:
        for drafter in ("m", "ngram"):
            assert all("#" in warning for warning in export(engine, drafter).warnings)
    assert any("vllm#13849" in w for w in export("vllm", "m", same_vocabulary=False).warnings)
    assert not any("vllm#13849" in w for w in export("vllm", "m", same_vocabulary=True).warnings)
    assert any("sglang#24051" in w for w in export("sglang", "m").warnings)


def test_every_text_states_its_version():
    found = exports(Wanted(Config("m", "greedy", 4), "t"))
    assert [e.engine for e in found] == list(ENGINES)
    assert all(any(c.isdigit() for c in e.version) for e in found)


def test_engines_without_the_method_say_so_in_one_line():
    found = {e.engine: e for e in exports(Wanted(Config("early-exit:8", "greedy", 4), "t"))}
    assert "assistant_early_exit=8" in found["transformers"].text
    for engine in set(ENGINES) - {"transformers"}:
        assert found[engine].text is None
        (note,) = found[engine].notes
        assert "no early-exit method" in note
    assert all(e.text is None for e in exports(Wanted(Config("layer-skip:1-2", "greedy", 4), "t")))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "drafter", ["blockwise:a/b", "staged:ngram>a/b", "tree:medusa:a/b", "sequoia:a/b", "layer-skip:3"]
)
def test_methods_that_an_engine_lacks_give_a_reason_and_no_text(engine, drafter):
    found = export(engine, drafter, schedule=SCHEDULE, acceptance=ACCEPTANCE)
    assert texts(found) == []
    assert "has no" in found.notes[0]


def test_off_leaves_speculation_out():
    found = {e.engine: e for e in exports(None)}
    assert found["vllm"].text is None
    assert "out" in found["vllm"].notes[0]
    assert not any("speculative" in (e.text or "") for e in found.values())


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
    settings = vllm_settings(export("vllm", drafter).text, "org/target")
    assert settings == {"method": method, "model": "a/b", "num_speculative_tokens": 4}


def test_shipped_drafts_and_lossy_rules_are_said_to_be_what_they_are():
    found = export("vllm", "eagle3:demo", rule="typical", temperature=0.8)
    assert any("typical acceptance" in note for note in found.notes)
    assert any("spectune train" in note for note in found.notes)
    assert export("vllm", "eagle3:mine", rule="speculative", temperature=0.8).notes == ()


def run_of(path, speedups):
    """A run with the given speedup at each (K, batch)."""
    cells = [synthetic_run.cell(k=k, batch=b, speedup=s) for (k, b), s in speedups.items()]
    run = load_run(synthetic_run.write_run(path, cells))
    return profiles(run), recommend(run, profiles(run))


def test_the_schedule_covers_every_batch_once_and_switches_off_where_nothing_is_faster(tmp_path):
    _, found = run_of(tmp_path, {(6, 1): 2.0, (2, 1): 1.5, (6, 4): 1.2, (2, 4): 1.6, (6, 16): 0.6, (2, 16): 0.8})
    assert batch_schedule(Config("draft", "greedy", 6), found.by_batch) == ((1, 3, 6), (4, 15, 2), (16, 16, 0))
    # Another drafter has no measured batch at which it is faster.
    assert batch_schedule(Config("other", "greedy", 6), found.by_batch) == ()


def test_one_k_for_all_batches_needs_no_schedule(tmp_path):
    _, found = run_of(tmp_path, {(4, 1): 2.0, (4, 8): 1.5})
    assert batch_schedule(Config("draft", "greedy", 4), found.by_batch) == ()


def test_the_forced_acceptance_is_the_measured_one(tmp_path):
    found, _ = run_of(tmp_path, {(4, 1): 2.0, (4, 8): 1.5})
    measured = measured_acceptance(Config("draft", "greedy", 4), found)
    rounds = sum(p.acceptance.rounds for p in found)
    assert measured.length == pytest.approx(1 + sum(p.acceptance.accepted for p in found) / rounds, abs=1e-4)
    assert 1 + sum(measured.joint) == pytest.approx(measured.length, abs=1e-3)
    assert list(measured.joint) == sorted(measured.joint, reverse=True)
    assert measured_acceptance(Config("draft", "greedy", 5), found) is None


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("drafter", ["eagle3:demo", "smollm2-4l"])
def test_a_shipped_draft_is_a_path_to_fill_in(engine, drafter):
    """No engine knows `demo`: a command with it would fail in the server."""
    found = export(engine, drafter)
    assert "path/to/your-" in found.text
    assert drafter.rpartition(":")[2] not in found.text
    assert any("Fill in the path" in note for note in found.notes)


def test_the_demo_model_is_named_by_its_hub_id(tmp_path, spectune):
    cells = [synthetic_run.cell(target="smollm2", drafter="org/model")]
    run = synthetic_run.write_run(tmp_path / "run", cells)
    _, out, _ = spectune("recommend", run, "--for", "vllm")
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct " in out
