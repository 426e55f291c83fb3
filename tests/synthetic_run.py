"""Run directories with known answers: the speedup, the acceptance and the times are put in by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from spectune.sweeping.cell import (
    Bandwidth,
    CellResult,
    CellSpec,
    FailedCell,
    ModelInfo,
    OutputCheck,
    PassResult,
    Reading,
    RequestResult,
    RoundCount,
    RoundTimes,
    RunInfo,
)
from spectune.sweeping.round_costs import Probe

STEP = 0.010  # seconds of a plain step
WHEN = "2026-01-01T00:00:00+00:00"
NOISE = (0.0, 0.01, -0.01, 0.005, -0.005, 0.008, -0.008, 0.002)  # relative, by prompt


def spec(**changes: Any) -> CellSpec:
    settings: dict[str, Any] = {
        "target": "target",
        "target_digest": "t0",
        "drafter": "draft",
        "drafter_digest": "d0",
        "suite": "code",
        "suite_digest": "s0",
        "k": 4,
        "batch": 1,
        "rule": "greedy",
        "max_new_tokens": 256,
        "chat_template": None,
        "dtype": "float32",
        "device": "cpu",
        "draft_device": "cpu",
        "repeats": 2,
    }
    return CellSpec(**(settings | changes))


def rounds_of(*rounds: tuple[int, int]) -> tuple[RoundCount, ...]:
    """(drafted, accepted) of each round."""
    return tuple(RoundCount(drafted=d, accepted=a, count=rounds.count((d, a))) for d, a in sorted(set(rounds)))


def request(
    rounds: Iterable[RoundCount],
    seconds: float,
    *,
    name: str = "p0",
    full: bool = True,
) -> RequestResult:
    """A request of whole rounds (each emits accepted + 1) that took `seconds` to decode."""
    rounds = tuple(rounds)
    tokens = sum((c.accepted + 1) * c.count for c in rounds)
    return RequestResult(
        id=name,
        prompt_tokens=10,
        output_tokens=1 + tokens,
        finish_reason="length",
        output_digest="same",
        ttft_seconds=0.05,
        decode_seconds=seconds,
        full_tokens=tokens if full else 0,
        full_seconds=seconds if full else 0.0,
        full_rounds=sum(c.count for c in rounds) if full else 0,
        rounds=rounds,
    )


NO_TIMES: dict[str, Any] = {
    "draft_mean": None,
    "verify_mean": None,
    "overhead_mean": None,
    "draft_median": None,
    "verify_median": None,
    "overhead_median": None,
    "mean_context": None,
    "draft_steps_mean": None,
}


def times(rounds: int, draft: float, verify: float, overhead: float, steps: float) -> RoundTimes:
    return RoundTimes(
        rounds=rounds,
        draft_mean=draft,
        verify_mean=verify,
        overhead_mean=overhead,
        draft_median=draft,
        verify_median=verify,
        overhead_median=overhead,
        mean_context=100.0,
        draft_steps_mean=steps,
    )


def bandwidth(**changes: Any) -> Bandwidth:
    none = Reading(value=None, reason="no GPU")
    readings: dict[str, Any] = {
        "bytes_per_plain_step": 1000,
        "bytes_per_round": 1500,
        "peak_bytes_per_second": Reading(value=1e9, source="copy"),
        "mbu_plain": Reading(value=0.5, source="model"),
        "mbu_speculative": Reading(value=0.4, source="model"),
        "dram_utilization": none,
        "memory_busy": none,
        "power_watts": none,
        "sm_clock_mhz": none,
    }
    return Bandwidth(**(readings | changes))


def cell(
    *,
    speedup: float = 2.0,
    rounds: tuple[RoundCount, ...] | None = None,
    cost_ratio: float = 0.1,
    verify: float = 1.0,
    prompts: int = 8,
    noise: float = 1.0,
    drift: Callable[[int], float] = lambda repeat: 0.0,
    steps: float | None = None,
    identical: bool | None = True,
    full: bool = True,
    timed: bool = True,
    warnings: tuple[str, ...] = (),
    **changes: Any,
) -> CellResult:
    """A cell whose pooled speedup is about `speedup`.

    `cost_ratio` (T_d/T_t) and `verify` (t_verify/T_t) set the parts of a round; what is left of the time that
    the speedup asks for is overhead. `noise` scales the prompts' spread, `drift(repeat)` shifts one repeat.
    """
    where = spec(**changes)
    rounds = rounds or (RoundCount(drafted=where.k, accepted=(where.k + 1) // 2, count=20),)
    per_round = sum((c.accepted + 1) * c.count for c in rounds) / sum(c.count for c in rounds)
    steps = sum(c.drafted * c.count for c in rounds) / sum(c.count for c in rounds) if steps is None else steps
    round_seconds = per_round * STEP / speedup
    draft = max(steps, 1) * cost_ratio * STEP
    passes = []
    for repeat in range(where.repeats):
        for mode in ("plain", "speculative"):
            requests = []
            for i in range(prompts):
                count = sum(c.count for c in rounds)
                if mode == "plain":
                    own = (RoundCount(drafted=0, accepted=0, count=round(per_round * count)),)
                    seconds = own[0].count * STEP
                else:
                    own = rounds
                    factor = 1 + noise * NOISE[i % len(NOISE)] + drift(repeat)
                    seconds = count * round_seconds * factor
                requests.append(request(own, seconds, name=f"p{i}", full=full))
            plain = times(100, 0.0, STEP, 0.0, 0.0)
            own_times = times(50, draft, verify * STEP, max(0.0, round_seconds - draft - verify * STEP), steps)
            passes.append(
                PassResult(
                    mode=mode,
                    repeat=repeat,
                    order=len(passes),
                    wall_seconds=sum(r.decode_seconds for r in requests) / where.batch + 0.1,
                    target_forwards=sum(c.count for r in requests for c in r.rounds),
                    requests=tuple(requests),
                    times=RoundTimes(rounds=0, **NO_TIMES) if not timed else plain if mode == "plain" else own_times,
                )
            )
    return CellResult(
        key=where.key,
        spec=where,
        started_at=WHEN,
        finished_at=WHEN,
        warmup_seconds=0.5,
        passes=tuple(passes),
        bandwidth=bandwidth(),
        output_check=None if identical is None else OutputCheck(verdict="identical" if identical else "different"),
        warnings=warnings,
    )


def probe(
    drafter: str | None,
    batch: int,
    k: int,
    verifying: float,
    suite: str = "code",
    drafting: float = 0.0,
    *,
    drafted: float | None = None,
    overhead: float = 0.0,
    error: float = 0.0,
) -> Probe:
    """Timed rounds, K tokens drafted in each unless told otherwise."""
    return Probe(
        drafter=drafter,
        suite=suite,
        batch=batch,
        k=k,
        rounds=6,
        drafted=k if drafted is None else drafted,
        draft_seconds=drafting,
        verify_seconds=verifying,
        overhead_seconds=overhead,
        error=error,
        cost_seconds=0.1,
    )


def failed(message: str = "out of memory", reason: str = "oom", **changes: Any) -> FailedCell:
    where = spec(**changes)
    return FailedCell(key=where.key, spec=where, failed_at=WHEN, reason=reason, message=message)


def model(name: str) -> ModelInfo:
    return ModelInfo(
        name=name,
        digest=name,
        parameters=1000,
        weight_bytes_per_step=4000,
        kv_bytes_per_token=64,
        layers=2,
        vocab_size=128,
        max_context=256,
        dtype="float32",
        device="cpu",
    )


def write_run(
    folder: Path,
    cells: Iterable[CellResult] = (),
    failures: Iterable[FailedCell] = (),
    **changes: Any,
) -> Path:
    """Write a run directory and return its path."""
    cells, failures = list(cells), list(failures)
    specs = [c.spec for c in (*cells, *failures)]
    settings: dict[str, Any] = {
        "name": folder.name,
        "created_at": WHEN,
        "spectune_version": "0.1.0",
        "command": ("spectune", "sweep"),
        "environment": {"cpu": "a processor", "torch": "2.9", "gpus": []},
        "target": model(specs[0].target if specs else "target"),
        "drafters": {s.drafter: None if s.drafter.startswith("ngram") else model(s.drafter) for s in specs},
        "plan": tuple(specs),
    }
    info = RunInfo(**(settings | changes))
    (folder / "cells").mkdir(parents=True)
    (folder / "run.json").write_text(info.model_dump_json(), encoding="utf-8")
    for c in cells:
        (folder / "cells" / f"{c.key}.json").write_text(c.model_dump_json(), encoding="utf-8")
    for f in failures:
        (folder / "cells" / f"{f.key}.failed.json").write_text(f.model_dump_json(), encoding="utf-8")
    return folder


def strict_json(text: str) -> Any:
    """Parse JSON and refuse NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
