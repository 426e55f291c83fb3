"""The bytes model, the bandwidth figures of a cell, and the theory card."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.measuring.bytes_model import (
    assess_bandwidth,
    break_even_acceptance,
    bytes_per_round,
    bytes_per_step,
    mbu,
    theory_card,
)
from spectune.measuring.nvml import GpuReadings
from spectune.sweeping.card import card_text
from spectune.sweeping.cell import ModelInfo, PassResult, Reading, RequestResult, RoundTimes

PEAK = Reading(value=1e9, source="copy: torch dot")
NO_PEAK = Reading(value=None, reason="no benchmark ran")


def model(weights: int = 1_000_000, kv: int = 100, device: str = "cpu") -> ModelInfo:
    return ModelInfo(
        name="m",
        digest="d",
        parameters=1,
        weight_bytes_per_step=weights,
        kv_bytes_per_token=kv,
        layers=1,
        vocab_size=1,
        max_context=1,
        dtype="float32",
        device=device,
    )


def times(
    draft: float | None = 0.0,
    verify: float | None = 0.002,
    overhead: float | None = 0.0,
    rounds: int = 10,
    context: float | None = 50.0,
    steps: float | None = 0.0,
) -> RoundTimes:
    return RoundTimes(
        rounds=rounds,
        draft_mean=draft,
        verify_mean=verify,
        overhead_mean=overhead,
        draft_median=draft,
        verify_median=verify,
        overhead_median=overhead,
        mean_context=context,
        draft_steps_mean=steps,
    )


def one_pass(mode: str, measured: RoundTimes) -> PassResult:
    request = RequestResult(
        id="p",
        prompt_tokens=1,
        output_tokens=1,
        finish_reason="length",
        output_digest="x",
        ttft_seconds=0,
        decode_seconds=0,
        full_tokens=0,
        full_seconds=0,
        rounds=(),
    )
    return PassResult(
        mode=mode,
        repeat=0,
        order=0,
        wall_seconds=1,
        target_forwards=1,
        requests=(request,),
        times=measured,
    )


# Bytes


def test_a_step_reads_the_weights_once_and_the_cache_of_every_row() -> None:
    assert bytes_per_step(model(weights=1000, kv=10), batch=4, mean_context=25.5) == 1000 + 1020


def test_a_round_reads_the_target_once_and_the_draft_once_per_step() -> None:
    target, draft = model(weights=1000, kv=10), model(weights=100, kv=1)
    assert bytes_per_round(target, draft, batch=2, mean_context=5, draft_steps=3) == 1100 + 3 * 110
    assert bytes_per_round(target, draft, batch=2, mean_context=5, draft_steps=2.5) == 1100 + 275


def test_a_drafter_without_weights_reads_nothing() -> None:
    target = model()
    assert bytes_per_round(target, None, batch=2, mean_context=5, draft_steps=9) == bytes_per_step(target, 2, 5)


counts = st.integers(0, 10**12)
small = st.integers(1, 512)
contexts = st.floats(0, 1e6)


@given(counts, st.integers(0, 10**7), small, contexts, st.integers(0, 64), st.integers(1, 64), contexts)
def test_more_rows_context_or_draft_steps_never_read_less(
    weights: int, kv: int, batch: int, context: float, steps: int, more: int, further: float
) -> None:
    target, draft = model(weights, kv), model(weights // 10, kv)

    def total(batch: int, context: float, steps: int) -> int:
        return bytes_per_round(target, draft, batch=batch, mean_context=context, draft_steps=steps)

    base = total(batch, context, steps)
    assert base >= bytes_per_step(target, batch, context) >= weights
    assert total(batch + more, context, steps) >= base
    assert total(batch, context + further, steps) >= base
    assert total(batch, context, steps + more) >= base


# MBU


@given(st.integers(1, 10**13), st.floats(1e-6, 1e3), st.floats(1e6, 1e13))
def test_mbu_is_bytes_over_time_over_peak_and_never_clipped(nbytes: int, seconds: float, peak: float) -> None:
    reading = mbu(nbytes, seconds, Reading(value=peak, source="user"))
    assert reading.source == "model"
    assert reading.value == pytest.approx(nbytes / (seconds * peak))


@pytest.mark.parametrize(
    ("seconds", "peak", "reason"),
    [
        (None, PEAK, "the round time is unknown"),
        (0.0, PEAK, "the round time is zero"),
        (1.0, NO_PEAK, "no benchmark ran"),
        (1.0, Reading(value=0.0, source="user"), "the peak bandwidth is zero"),
    ],
)
def test_mbu_is_null_with_the_reason(seconds: float | None, peak: Reading, reason: str) -> None:
    assert mbu(10, seconds, peak) == Reading(value=None, reason=reason)


# A cell


def test_a_cell_divides_by_the_round_time_not_the_token_time() -> None:
    passes = [
        one_pass("plain", times(verify=0.002)),
        one_pass("speculative", times(draft=0.001, verify=0.002, overhead=0.001, steps=4.0)),
    ]
    target, draft = model(weights=1_000_000, kv=100), model(weights=100_000, kv=10)
    bandwidth, warnings = assess_bandwidth(target, draft, passes, 2, PEAK, None)
    assert bandwidth.bytes_per_plain_step == 1_010_000
    assert bandwidth.bytes_per_round == 1_010_000 + 4 * 101_000
    assert bandwidth.mbu_plain.value == pytest.approx(1_010_000 / 0.002 / 1e9)
    assert bandwidth.mbu_speculative.value == pytest.approx(1_414_000 / 0.004 / 1e9)
    assert bandwidth.mbu_draft.value == pytest.approx(404_000 / 0.001 / 1e9)
    assert bandwidth.mbu_verify.value == pytest.approx(1_010_000 / 0.002 / 1e9)
    assert bandwidth.mbu_plain.source == "model"
    assert bandwidth.power_watts.reason == "no GPU monitor ran"
    assert warnings == ()


def test_passes_are_weighted_by_their_rounds() -> None:
    passes = [
        one_pass("plain", times(verify=0.002, rounds=30, context=10)),
        one_pass("plain", times(verify=0.006, rounds=10, context=50)),
        one_pass("plain", times(verify=None, rounds=0, context=None)),
        one_pass("speculative", times()),
    ]
    bandwidth, _ = assess_bandwidth(model(kv=100), None, passes, 1, PEAK, None)
    assert bandwidth.bytes_per_plain_step == 1_000_000 + 20 * 100
    assert bandwidth.mbu_plain.value == pytest.approx(1_002_000 / 0.003 / 1e9)


def test_a_plain_pass_may_leave_its_draft_time_out() -> None:
    passes = [one_pass("plain", times(draft=None)), one_pass("speculative", times(draft=None))]
    bandwidth, _ = assess_bandwidth(model(), None, passes, 1, PEAK, None)
    assert bandwidth.mbu_plain.value is not None
    assert bandwidth.mbu_speculative.reason == "the round time is unknown"


def test_more_than_the_peak_is_kept_and_warned_about() -> None:
    passes = [one_pass("plain", times(verify=0.0005)), one_pass("speculative", times(verify=0.002))]
    bandwidth, warnings = assess_bandwidth(model(), None, passes, 1, PEAK, None)
    assert bandwidth.mbu_plain.value == pytest.approx(2.01)
    (warning,) = warnings
    assert warning.startswith("plain decoding would use 2.01 of the peak bandwidth")
    assert "the bytes model or the peak is wrong" in warning


def test_two_devices_have_no_common_mbu() -> None:
    passes = [one_pass("plain", times()), one_pass("speculative", times(steps=2.0))]
    target, draft = model(device="cuda:0"), model(device="cpu")
    bandwidth, _ = assess_bandwidth(target, draft, passes, 1, PEAK, None)
    assert bandwidth.mbu_plain.value is not None
    assert "two peaks" in (bandwidth.mbu_speculative.reason or "")


def test_unknown_context_and_steps_are_told() -> None:
    passes = [one_pass("plain", times(context=None)), one_pass("speculative", times(steps=None))]
    bandwidth, warnings = assess_bandwidth(model(), model(), passes, 1, PEAK, None)
    assert bandwidth.mbu_speculative.reason == "the number of draft steps is unknown"
    assert warnings == ("the context of plain rounds is unknown, so their KV bytes are left out",)


def test_no_rounds_at_all_is_null_with_the_reason() -> None:
    empty = times(None, None, None, rounds=0, context=None, steps=None)
    passes = [one_pass("plain", empty), one_pass("speculative", empty)]
    bandwidth, warnings = assess_bandwidth(model(), None, passes, 1, PEAK, None)
    assert bandwidth.mbu_plain.reason == bandwidth.mbu_speculative.reason == "the round time is unknown"
    assert bandwidth.bytes_per_plain_step == 1_000_000
    assert warnings == ()


def test_the_gpu_readings_are_passed_on_and_throttling_is_warned_about() -> None:
    null = Reading(value=None, reason="r")
    readings = GpuReadings(
        dram_utilization=Reading(value=0.5, source="gpm"),
        memory_busy=Reading(value=0.9, source="busy-time"),
        power_watts=null,
        energy_joules=null,
        sm_clock_mhz=Reading(value=1000.0, source="nvml"),
        mem_clock_mhz=null,
        temperature_c=null,
        throttle_reasons=("sw_power_cap",),
    )
    passes = [one_pass("plain", times()), one_pass("speculative", times())]
    bandwidth, warnings = assess_bandwidth(model(), None, passes, 1, PEAK, readings)
    assert (bandwidth.dram_utilization.source, bandwidth.memory_busy.source) == ("gpm", "busy-time")
    assert bandwidth.throttle_reasons == ("sw_power_cap",)
    assert warnings == ("the GPU held its clocks down: sw_power_cap",)


# Break-even


@pytest.mark.parametrize(
    ("k", "cost", "alpha"),
    [
        (1, 0.3, 0.3),  # 1 + α = 1 + c
        (2, 0.1, (math.sqrt(1.8) - 1) / 2),  # α + α² = 2c
        (2, 0.5, (math.sqrt(5) - 1) / 2),
        (5, 0.0, 0.0),
        (5, 1.0, 1.0),
    ],
)
def test_break_even_by_hand(k: int, cost: float, alpha: float) -> None:
    assert break_even_acceptance(k, cost) == pytest.approx(alpha, abs=1e-12)


def test_a_draft_that_costs_more_than_the_target_cannot_pay() -> None:
    assert break_even_acceptance(4, 1.0001) is None


@given(st.integers(1, 32), st.floats(0, 1))
def test_at_break_even_a_round_yields_exactly_what_it_costs(k: int, cost: float) -> None:
    alpha = break_even_acceptance(k, cost)
    assert alpha is not None
    assert 0 <= alpha <= 1
    assert math.fsum(alpha**i for i in range(k + 1)) == pytest.approx(1 + k * cost, rel=1e-9)


@given(st.integers(1, 16), st.floats(0, 1), st.floats(0, 1))
def test_a_dearer_draft_must_be_better(k: int, one: float, other: float) -> None:
    cheap, dear = sorted((one, other))
    low, high = break_even_acceptance(k, cheap), break_even_acceptance(k, dear)
    assert low is not None
    assert high is not None
    assert low <= high


# Theory card


def test_the_card_predicts_ceilings_and_costs_per_batch() -> None:
    card = theory_card(
        model(weights=1_000_000, kv=100),
        {"small": model(weights=100_000, kv=100), "ngram": None, "big": model(weights=3_000_000)},
        batches=[1, 10],
        ks=[1, 2],
        mean_context=1000,
        peak=PEAK,
    )
    one, ten = card.batches
    assert (one.weight_bytes, one.kv_bytes, one.step_bytes) == (1_000_000, 100_000, 1_100_000)
    assert one.ceiling_tokens_per_second.value == pytest.approx(1e9 / 1_100_000)
    assert ten.ceiling_tokens_per_second.value == pytest.approx(10e9 / 2_000_000)
    assert len(card.drafts) == 3 * 2 * 2
    drafts = {(d.drafter, d.batch, d.k): d for d in card.drafts}
    assert drafts["small", 1, 1].cost_ratio == pytest.approx(200_000 / 1_100_000)
    assert drafts["small", 10, 1].cost_ratio == pytest.approx(1_100_000 / 2_000_000)
    assert drafts["small", 1, 1].break_even_acceptance == pytest.approx(200_000 / 1_100_000)
    assert drafts["ngram", 10, 2].cost_ratio == 0
    assert drafts["ngram", 10, 2].break_even_acceptance == 0
    assert drafts["big", 1, 2].break_even_acceptance is None


def test_the_card_in_words_has_a_line_per_drafter_with_its_break_even_over_the_range_of_k() -> None:
    drafts = {"small": model(weights=400_000), "ngram": None, "big": model(weights=3_000_000), "twin": model()}
    card = theory_card(model(), drafts, batches=[1], ks=[1, 3], mean_context=0, peak=PEAK)
    lines = [line.strip() for line in card_text(card).splitlines()]
    assert [line for line in lines if line.startswith("small")] == [
        "small: a draft step reads 0.40 of a target step: pays above 40% acceptance per token at K 1, above 61% at K 3"
    ]
    x = 0.61
    assert x + x**2 + x**3 == pytest.approx(3 * 0.4, abs=0.02)
    assert "twin: a draft step reads 1.00 of a target step: pays above 100% acceptance per token" in lines
    assert "big: a draft step reads 3.00 of a target step: cannot pay" in lines
    assert sum(line.startswith("ngram:") for line in lines) == 1


def test_without_a_peak_the_card_has_no_ceiling_but_keeps_the_costs() -> None:
    card = theory_card(model(), {"d": model()}, batches=[1], ks=[1], mean_context=0, peak=NO_PEAK)
    assert card.batches[0].ceiling_tokens_per_second == NO_PEAK
    assert card.drafts[0].break_even_acceptance == pytest.approx(1.0)


def test_a_target_that_reads_nothing_has_no_ceiling() -> None:
    card = theory_card(model(0, 0), {"d": model()}, batches=[1], ks=[1], mean_context=9, peak=PEAK)
    assert card.batches[0].ceiling_tokens_per_second.reason == "the target reads no bytes"
    assert card.drafts[0].cost_ratio is None
    assert card.drafts[0].break_even_acceptance is None


def test_the_bytes_model_is_free_of_torch() -> None:
    code = "import sys, spectune.measuring.bytes_model; print({'torch', 'pynvml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
