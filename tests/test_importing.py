"""Importing other tools' results: definitions converted, checked against the counts, and asked for where left open.

The small files are made by hand in the formats that the importers' docstrings name.
"""

from __future__ import annotations

import json

import pytest

from spectune.errors import UsageError
from spectune.importing.analysis import compare, fitted, left_out
from spectune.importing.definitions import Answers, conditional_of, joint_of, joint_of_kept, with_bonus
from spectune.importing.registry import import_points

# 100 rounds of 4 drafted tokens, 180 accepted: length 2.8 with the bonus token, 1.8 without.
VLLM = {
    "backend": "vllm",
    "model_id": "org/target",
    "completed": 20,
    "failed": 0,
    "max_concurrency": 8,
    "total_output_tokens": 300,
    "output_throughput": 150.0,
    "mean_ttft_ms": 20.0,
    "mean_tpot_ms": 8.0,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 400,
    "spec_decode_accepted_tokens": 180,
    "spec_decode_acceptance_rate": 45.0,
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.3, 0.2],
}
PLAIN = {key: value for key, value in VLLM.items() if not key.startswith("spec_decode")} | {
    "output_throughput": 100.0,
    "mean_tpot_ms": 12.0,
}
KEPT = {0: 20, 1: 30, 2: 20, 3: 10, 4: 20}  # the same rounds, by accepted tokens
AIPERF = {
    "output_token_throughput": {"unit": "tokens/sec", "avg": 150.0},
    "time_to_first_token": {"unit": "ms", "avg": 20.0},
    "inter_token_latency": {"unit": "ms", "avg": 8.0},
    "spec_decode_acceptance_length": {"unit": "ratio", "avg": 2.5},
    "spec_decode_token_weighted_acceptance_length": {"unit": "ratio", "avg": 2.8},
    "spec_decode_overall_draft_acceptance_rate": {"unit": "%", "avg": 45.0},
    "total_spec_decode_steps": {"unit": "count", "avg": 100},
    "total_draft_tokens": {"unit": "tokens", "avg": 400},
    "total_accepted_draft_tokens": {"unit": "tokens", "avg": 180},
    "pooled_spec_decode_acceptance_histogram": {str(a): n for a, n in KEPT.items()},
    "input_config": {"phases": [{"concurrency": 8}]},
}
SPECDEC = {
    "Request_AL": {"0": {"0": 2.6}, "1": {"0": 3.0}},
    "Average_AL": 2.5,
    "Acceptance_Length_Histogram": {str(a + 1): n for a, n in KEPT.items()},
    "Conditional_Acceptance_Rate": {"1": 1.0, "2": 0.8, "3": 0.625, "4": 0.6, "5": 2 / 3},
    "Joint_Acceptance_Rate": {"1": 1.0, "2": 0.8, "3": 0.5, "4": 0.3, "5": 0.2},
}
PROFILE = {
    "schema_version": "1.0",
    "measured": True,
    "method": "eagle3",
    "num_speculative_tokens": 4,
    "conditional_accept_rates": [0.8, 0.625, 0.6, 2 / 3],
    "marginal_accept_rates": [0.8, 0.5, 0.3, 0.2],
    "mean_accept_length": 2.8,
    "mean_accept_length_per_request": 2.5,
    "acceptance_length_histogram": None,
}
TIMINGS = {
    "prompt_n": 10,
    "prompt_ms": 5.0,
    "predicted_n": 281,
    "predicted_ms": 2240.0,
    "draft_n": 400,
    "draft_n_accepted": 180,
}
CSV = (
    "k,batch,tokens_per_second,rounds,drafted,accepted,joint_1,joint_2,joint_3,joint_4\n"
    "4,8,150,100,400,180,0.8,0.5,0.3,0.2\n"
)
RECORD = {
    "metadata": {"session_num": 0},
    "metrics": {},
    "spec_decode_acceptance": {
        "engine": "vllm",
        "mean_acceptance_length": 2.8,
        "draft_acceptance_rate": 0.45,
        "acceptance_histogram": {str(a): n for a, n in KEPT.items()},
        "num_accepted_draft_tokens": 180,
        "num_draft_tokens": 400,
        "num_spec_steps": 100,
        "num_spec_tokens": 4,
    },
}


def points(folder, content, *, name="results.json", answers=None, **options):
    file = folder / name
    if name.endswith(".jsonl"):
        content = "\n".join(json.dumps(line) for line in content)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return import_points([file], answers or Answers(), **options)


EVERY_FORMAT = [
    ("vllm-bench", "results.json", VLLM),
    ("aiperf", "profile_export_aiperf.json", AIPERF),
    ("aiperf", "profile_export.jsonl", [RECORD]),
    ("specdec-bench", "acceptance_rate.json", [SPECDEC]),
    ("specdec-bench", "speculation_profile.json", PROFILE),
    ("llama.cpp", "responses.json", {"content": "x", "timings": TIMINGS}),
    ("csv", "mine.csv", CSV),
]


@pytest.mark.parametrize(("format", "name", "content"), EVERY_FORMAT)
def test_the_same_rounds_have_the_same_length_in_every_format(tmp_path, format, name, content):
    (point,) = points(tmp_path, content, name=name, answers=Answers(k=4))
    assert point.format == format
    assert point.k == 4
    assert point.acceptance_length == pytest.approx(2.8)
    if point.drafted is not None:
        assert point.acceptance_rate == pytest.approx(0.45)
        assert (point.rounds, point.accepted) == (100, 180)
        assert point.acceptance_length == pytest.approx(1 + point.accepted / point.rounds)
    if point.joint:
        assert point.joint == pytest.approx((0.8, 0.5, 0.3, 0.2))
        assert 1 + sum(point.joint) == pytest.approx(point.acceptance_length)
    if point.conditional:
        assert joint_of(point.conditional) == pytest.approx(point.joint)
    for field in (
        "rounds",
        "drafted",
        "accepted",
        "acceptance_rate",
        "joint",
        "conditional",
        "tokens_per_second",
        "batch",
    ):
        assert bool(getattr(point, field)) != (field in point.missing), field


def test_a_round_histogram_and_its_rates_are_one_thing():
    joint = joint_of_kept(KEPT, 4)
    assert joint == pytest.approx((0.8, 0.5, 0.3, 0.2))
    assert joint_of(conditional_of(joint)) == pytest.approx(joint)
    assert conditional_of((0.5, 0.0, 0.0)) == (0.5, 0.0, None)
    assert with_bonus(1.8, "excluded") == with_bonus(2.8, "included") == 2.8


def test_times_become_seconds_and_percent_becomes_a_share(tmp_path):
    for content in (VLLM, AIPERF):
        (point,) = points(tmp_path, content)
        assert (point.ttft_seconds, point.tpot_seconds) == pytest.approx((0.02, 0.008))
        assert (point.batch, point.tokens_per_second) == (8, 150.0)


def test_the_mean_over_requests_is_never_taken_for_the_pooled_length(tmp_path):
    for content in (AIPERF, SPECDEC, PROFILE):
        (point,) = points(tmp_path, content)
        assert point.mean_request_acceptance_length == 2.5
        assert point.acceptance_length == pytest.approx(2.8)


def test_a_length_that_the_counts_contradict_is_refused_with_file_and_key(tmp_path):
    with pytest.raises(UsageError, match=r"results.json: spec_decode_acceptance_length: 3.4 is stated"):
        points(tmp_path, VLLM | {"spec_decode_acceptance_length": 3.4})
    with pytest.raises(UsageError, match=r"profile.json: spec_decode_overall_draft_acceptance_rate"):
        points(tmp_path, AIPERF | {"spec_decode_overall_draft_acceptance_rate": {"unit": "%", "avg": 56.0}},
               name="profile.json")  # fmt: skip
    with pytest.raises(UsageError, match=r"num_spec_steps|2 rounds|histogram"):
        points(tmp_path, AIPERF | {"total_spec_decode_steps": {"unit": "count", "avg": 90}})


def test_a_length_whose_bonus_nobody_states_is_asked_for_and_not_guessed(tmp_path):
    table = "k,acceptance_length\n4,1.8\n"
    with pytest.raises(UsageError, match="acceptance_length does not say") as caught:
        points(tmp_path, table, name="a.csv")
    assert "--bonus" in caught.value.hint
    (excluded,) = points(tmp_path, table, name="a.csv", answers=Answers(bonus="excluded"))
    (included,) = points(tmp_path, table, name="a.csv", answers=Answers(bonus="included"))
    assert (excluded.acceptance_length, included.acceptance_length) == pytest.approx((2.8, 1.8))
    (column,) = points(tmp_path, "k,acceptance_length,bonus\n4,1.8,excluded\n", name="a.csv")
    assert column.acceptance_length == excluded.acceptance_length
    # Counts settle it.
    (counted,) = points(tmp_path, "k,acceptance_length,rounds,accepted\n4,1.8,100,180\n", name="a.csv")
    assert counted.acceptance_length == pytest.approx(2.8)
    with pytest.raises(UsageError, match="with the bonus token included is stated where the counts give"):
        points(tmp_path, "k,acceptance_length,rounds,accepted,bonus\n4,1.8,100,180,included\n", name="a.csv")
    only_length = {k: v for k, v in VLLM.items() if not k.startswith("spec_decode")} | {
        "spec_decode_acceptance_length": 2.8
    }
    with pytest.raises(UsageError, match="does not say"):
        points(tmp_path, only_length)


def test_rates_by_position_are_joint_or_conditional_as_said(tmp_path):
    table = "k,position_1,position_2\n2,0.8,0.5\n"
    with pytest.raises(UsageError, match="joint or conditional"):
        points(tmp_path, table, name="a.csv")
    (joint,) = points(tmp_path, table, name="a.csv", answers=Answers(rates="joint"))
    (conditional,) = points(tmp_path, table, name="a.csv", answers=Answers(rates="conditional"))
    assert joint.acceptance_length == pytest.approx(2.3)
    assert conditional.acceptance_length == pytest.approx(1 + 0.8 + 0.4)
    assert "never shortened" in conditional.notes[0]
    cut = "k,rounds,drafted,conditional_1,conditional_2\n2,10,15,0.8,0.5\n"
    (shortened,) = points(tmp_path, cut, name="a.csv")
    assert (shortened.joint, shortened.acceptance_length) == ((), None)
    with pytest.raises(UsageError, match="never rise"):
        points(tmp_path, "k,joint_1,joint_2\n2,0.5,0.8\n", name="a.csv")


def test_conditional_rates_are_not_made_from_shortened_drafts(tmp_path):
    (point,) = points(tmp_path, VLLM | {"spec_decode_draft_tokens": 350, "spec_decode_acceptance_rate": 51.4})
    assert point.conditional == ()
    assert "shortened" in point.missing["conditional"]
    assert fitted([point])[0].iid_rate is None


def test_a_histogram_with_empty_steps_does_not_count_the_bonus(tmp_path):
    content = {"Acceptance_Length_Histogram": {str(a): n for a, n in KEPT.items()}, "Average_AL": 1.5}
    with pytest.raises(UsageError, match="steps of 0 tokens"):
        points(tmp_path, content)
    (point,) = points(tmp_path, content, answers=Answers(bonus="excluded"))
    assert point.acceptance_length == pytest.approx(2.8)
    assert point.mean_request_acceptance_length == 2.5


def test_placeholders_and_unknown_units_are_refused(tmp_path):
    with pytest.raises(UsageError, match="placeholder"):
        points(tmp_path, PROFILE | {"measured": False})
    with pytest.raises(UsageError, match="time_to_first_token: unit 'fortnights'"):
        points(tmp_path, AIPERF | {"time_to_first_token": {"unit": "fortnights", "avg": 1.0}})


def test_llama_cpp_rounds_leave_the_prefill_token_out_and_responses_are_pooled(tmp_path):
    none_drafted = {"timings": {"predicted_n": 11, "predicted_ms": 100.0}}
    (point,) = points(tmp_path, [{"timings": TIMINGS}, none_drafted], name="r.jsonl", answers=Answers(k=4))
    assert (point.rounds, point.accepted, point.output_tokens) == (110, 180, 292)
    assert point.output_tokens == 2 + point.rounds + point.accepted
    (plain,) = points(tmp_path, none_drafted)
    assert plain.rounds is None
    assert "nothing was drafted" in plain.missing["k"]


def test_a_sweep_folder_names_k_by_its_own_settings(tmp_path):
    folder = tmp_path / "sweep" / "SERVE-a"
    folder.mkdir(parents=True)
    speculating = VLLM | {"run_number": 0, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    off = PLAIN | {"run_number": 0, "speculative_config": None}
    (folder / "summary.json").write_text(json.dumps([speculating, off]))
    (folder / "run=0.json").write_text(json.dumps(speculating))
    found = import_points([tmp_path / "sweep"], Answers(k=0))
    assert [(p.k, p.drafter) for p in found] == [(4, "ngram"), (0, None)]


def test_a_sweep_table_written_by_pandas_is_the_same(tmp_path):
    row = VLLM | {"num_speculative_tokens": 4}
    quoted = ['"' + json.dumps(v).replace('"', '""') + '"' if not isinstance(v, str) else v for v in row.values()]
    table = ",".join(["", *row]) + "\n" + ",".join(["0", *quoted]) + "\n"
    (point,) = points(tmp_path, table, name="summary.csv")
    (same,) = points(tmp_path, row)
    python = ",".join(["", *row]) + "\n0," + ",".join(f'"{v!r}"' for v in row.values()) + "\n"
    (literal,) = points(tmp_path, python.replace("'", ""), name="summary.csv")
    assert literal.acceptance_length == same.acceptance_length
    assert point.model_dump(exclude={"file"}) == same.model_dump(exclude={"file"})


def test_silence_about_speculation_is_not_taken_for_plain_decoding(tmp_path):
    (point,) = points(tmp_path, PLAIN)
    assert point.k is None
    assert compare([point]) == ()
    assert "--k" in left_out([point])[0]
    (plain,) = points(tmp_path, PLAIN, answers=Answers(k=0))
    assert plain.k == 0


def test_speedups_are_ratios_at_one_place_with_the_range_of_repeats_and_the_cost_of_a_round(tmp_path):
    fast = [p.model_copy(update={"repeat": i, "tokens_per_second": s}) for i, s in enumerate((150.0, 160.0))
            for p in points(tmp_path, VLLM)]  # fmt: skip
    plain = [p.model_copy(update={"repeat": i, "tokens_per_second": s}) for i, s in enumerate((100.0, 110.0))
             for p in points(tmp_path, PLAIN, answers=Answers(k=0))]  # fmt: skip
    (found,) = compare([*fast, *plain])
    assert found.speedup == pytest.approx(155 / 105)
    assert found.low <= found.speedup <= found.high
    assert found.round_cost * found.speedup == pytest.approx(found.acceptance_length)
    (alone,) = compare(fast)
    assert alone.speedup is None
    assert "no plain decoding" in alone.reason
    elsewhere = [p.model_copy(update={"batch": 1}) for p in plain]
    assert compare([*fast, *elsewhere])[0].speedup is None


def test_the_iid_rate_gives_the_length_back(tmp_path):
    (point,) = points(tmp_path, VLLM)
    (found,) = fitted([point])
    assert 1 + sum(found.iid_rate**i for i in range(1, 5)) == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"output_throughput": 1', "a.json is no JSON"),
        ("a.json", "", "a.json is empty"),
        ("a.json", json.dumps({"foo": 1}), "no known format; its keys are foo"),
        ("a.json", json.dumps(VLLM | {"output_throughput": "fast"}), "output_throughput is not a number"),
        ("a.json", json.dumps(VLLM | {"spec_decode_num_drafts": 1.5}), "spec_decode_num_drafts is not a count"),
        ("a.json", json.dumps(VLLM | {"completed": 0}), "completed: no request"),
        ("a.json", '{"output_throughput": NaN, "total_output_tokens": 1}', "NaN is no number"),
        ("a.csv", "k,speed\n4,1\n", "unknown column 'speed'"),
        ("a.csv", "k,batch\n4,1,7\n", "line 2 has more values"),
        ("a.csv", "k,acceptance_rate\n4,45\n", "acceptance_rate: a share lies between 0 and 1"),
        ("a.csv", "k,drafted,accepted\n4,10,11\n", "11 accepted of 10"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path, name, content, message):
    with pytest.raises(UsageError, match=message) as caught:
        points(tmp_path, content, name=name)
    assert str(tmp_path / name) in caught.value.message


def test_a_format_can_be_named_and_is_then_checked(tmp_path):
    with pytest.raises(UsageError, match=r"does not look like llama.cpp"):
        points(tmp_path, VLLM, format="llama.cpp")
