"""One flat row per cell: the columns of the export, of `report --json` and of the page's tables.

reports/README.md explains every column. A value without a definition (a denominator of 0, a clock that was
not read) is None.
"""

from __future__ import annotations

from typing import Any

from spectune.speedup.models import Prediction
from spectune.speedup.profile import Profile
from spectune.sweeping.cell import Bandwidth, CellSpec, FailedCell, Reading

READINGS = (
    "peak_bytes_per_second",
    "mbu_plain",
    "mbu_speculative",
    "mbu_draft",
    "mbu_verify",
    "dram_utilization",
    "memory_busy",
    "power_watts",
    "sm_clock_mhz",
)


_OLDER = Reading(value=None, reason="written by an older version")


def readings(bandwidth: Bandwidth) -> dict[str, Reading]:
    """The cell's readings by name."""
    return {name: getattr(bandwidth, name) or _OLDER for name in READINGS}


def cell_row(p: Profile, prediction: Prediction) -> dict[str, Any]:
    """All named metrics of a finished cell, in the order of the table above."""
    counted, timed, sped = p.acceptance, p.timing, p.speedup
    bandwidth = p.cell.bandwidth
    return {
        "key": p.cell.key,
        "status": "finished",
        **place(p.spec),
        "failure": None,
        "acceptance_length": counted.acceptance_length,
        "mean_request_acceptance_length": counted.mean_request_acceptance_length,
        "acceptance_rate": counted.acceptance_rate,
        "drafted_per_round": counted.drafted_per_round,
        "tokens_per_target_forward": counted.tokens_per_target_forward,
        "rounds": counted.rounds,
        "undrafted_rounds": counted.undrafted_rounds,
        "drafted": counted.drafted,
        "accepted": counted.accepted,
        "joint_acceptance": list(counted.joint_acceptance),
        "conditional_acceptance": list(counted.conditional_acceptance),
        "speedup": sped.value,
        "speedup_low": sped.low,
        "speedup_high": sped.high,
        "verdict": sped.verdict,
        "no_speedup_reason": sped.reason if sped.value is None else None,
        "no_interval_reason": sped.reason if sped.value is not None and sped.low is None else None,
        "repeat_speedups": list(timed.repeat_speedups) if p.excluded is None else [],
        "prompts": sped.prompts,
        "repeats": sped.repeats,
        "full_occupancy": timed.full_occupancy,
        "plain_tokens_per_second": timed.plain_tokens_per_second,
        "speculative_tokens_per_second": None if p.excluded else timed.speculative_tokens_per_second,
        "plain_end_to_end_tokens_per_second": timed.plain_end_to_end_tokens_per_second,
        "speculative_end_to_end_tokens_per_second": None
        if p.excluded
        else timed.speculative_end_to_end_tokens_per_second,
        "plain_ttft_seconds": timed.plain_ttft_seconds,
        "speculative_ttft_seconds": timed.speculative_ttft_seconds,
        "plain_tpot_seconds": timed.plain_tpot_seconds,
        "speculative_tpot_seconds": None if p.excluded else timed.speculative_tpot_seconds,
        "target_step_seconds": timed.target_step_seconds,
        "draft_step_seconds": timed.draft_step_seconds,
        "cost_ratio": timed.cost_ratio,
        "draft_seconds": timed.draft_seconds,
        "verify_seconds": timed.verify_seconds,
        "overhead_seconds": timed.overhead_seconds,
        "draft_steps": timed.draft_steps,
        "plain_overhead_seconds": timed.plain_overhead_seconds,
        "verify_inflation": timed.verify_inflation,
        "overhead_share": timed.overhead_share,
        "break_even_length": timed.break_even_length,
        "mean_context": timed.mean_context,
        "card_speedup": prediction.card,
        "full_speedup": prediction.full,
        "card_residual": _residual(prediction.card, prediction.measured),
        "full_residual": _residual(prediction.full, prediction.measured),
        "held_out_speedup": prediction.held_out,
        "bytes_per_plain_step": bandwidth.bytes_per_plain_step,
        "bytes_per_round": bandwidth.bytes_per_round,
        **{name: reading.value for name, reading in readings(bandwidth).items()},
        "output_check": p.cell.output_check.verdict if p.cell.output_check else None,
        "excluded": p.excluded,
        "warnings": list(p.notes),
    }


def failed_row(failed: FailedCell) -> dict[str, Any]:
    """The same columns for a cell without a result: all metrics are left out."""
    failure = f"{failed.reason}: {failed.message}"
    return {"key": failed.key, "status": "failed", **place(failed.spec), "failure": failure}


def place(spec: CellSpec) -> dict[str, Any]:
    """Where a cell stands in the plan."""
    return {
        "suite": spec.suite,
        "batch": spec.batch,
        "drafter": spec.drafter,
        "rule": spec.rule,
        "k": spec.k,
        "synthetic": spec.synthetic is not None,
    }


def _residual(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted - measured
