"""Is the gate as sure as it says? Simulated gates with measured noise: false alarms, and how often a loss is caught.

    python -m spectune.gating.calibration reports/examples/smollm2-scatter

Each argument is a run directory or a baseline file. Repeats and requests are drawn from the scatter found there,
times `--scale` to ask about a quieter machine. The judged code is the gate's own. Beside it stands a bootstrap over
repeats and prompts at the same level, which is too sure of itself with few repeats: that is why the gate uses Welch's
test.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spectune.gating import timed
from spectune.gating.baseline import Baseline, Cell, PassTimes, Times, read_baseline
from spectune.gating.metric import METRICS
from spectune.gating.noise import Array, Noise, measured_noise
from spectune.gating.policy import Policy
from spectune.gating.snapshot import read_snapshot

TRIALS = 1000
REPEATS = (3, 8, 12, 20)
PROMPTS = 8
CELLS = (1, 4)
LOSS = 0.10
TOKENS = 40
_SPEEDUP = METRICS["speedup"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of the trials. `significant` leaves the threshold out; `bootstrap` is the same by a bootstrap."""

    regression: float
    cannot_judge: float
    significant: float
    bootstrap: float


def simulate(
    noise: Noise, like: Cell, *, repeats: int, prompts: int, cells: int, loss: float, trials: int, seed: int = 0
) -> Rates:
    """Gates of `cells` cells, each of which has lost `loss` of its speedup."""
    generator = np.random.default_rng(seed)
    regressions = unsure = significant = bootstrapped = 0
    for _ in range(trials):
        pairs = [
            (
                _cell(like, _seconds(noise, generator, repeats, prompts, 0.0)),
                _cell(like, _seconds(noise, generator, repeats, prompts, loss)),
            )
            for _ in range(cells)
        ]
        verdicts = {c.verdict for c in timed.comparisons(_SPEEDUP, pairs, Policy(), machine=None)}
        regressions += "REGRESSION" in verdicts
        unsure += "CANNOT JUDGE" in verdicts and "REGRESSION" not in verdicts
        effects = [timed.effect(_SPEEDUP, *(timed.repeat_values(_SPEEDUP, c) for c in pair)) for pair in pairs]
        significant += any(e is not None and e.p_worse < timed.ALPHA / cells for e in effects)
        bootstrapped += any(_bootstrap_p(generator, *pair) < timed.ALPHA / cells for pair in pairs)
    return Rates(*(n / trials for n in (regressions, unsure, significant, bootstrapped)))


def _seconds(noise: Noise, generator: np.random.Generator, repeats: int, prompts: int, loss: float) -> Array:
    """[mode, repeat, prompt]: plain decoding takes 1, speculation 1 / 1.5, and more where speed was lost."""
    shared = generator.choice(noise.repeats, size=repeats).T[:, :, None]
    own = generator.choice(noise.requests, size=(2, repeats, prompts))
    usual = np.array([1.0, 1 / (1.5 * (1 - loss))])[:, None, None]
    return np.asarray(usual * np.exp(shared + own))


def _cell(like: Cell, seconds: Array) -> Cell:
    """A cell with these times; not validated, since it is made a hundred thousand times."""
    modes = []
    for mode in seconds:
        passes = []
        for own in mode:
            n = len(own)
            passes.append(
                PassTimes.model_construct(
                    tokens=(TOKENS,) * n, seconds=tuple(own.tolist()), ttft_seconds=(0.1,) * n, tpot_seconds=(0.1,) * n
                )
            )
        modes.append(tuple(passes))
    times = Times.model_construct(plain=modes[0], speculative=modes[1])
    return like.model_copy(update={"times": times, "no_speed": None})


def _bootstrap_p(generator: np.random.Generator, before: Cell, now: Cell, resamples: int = 1000) -> float:
    """Share of the resamples without a loss: prompts drawn for both runs alike, repeats for each."""
    prompts = len(before.times.plain[0].seconds) if before.times else 0
    by_prompt = generator.multinomial(prompts, [1 / prompts] * prompts, size=resamples)
    logs = []
    for cell in (before, now):
        assert cell.times is not None
        repeats = len(cell.times.plain)
        by_repeat = generator.multinomial(repeats, [1 / repeats] * repeats, size=resamples)
        sums = [
            ((by_prompt @ np.array([p.seconds for p in passes]).T) * by_repeat).sum(axis=1)
            for passes in (cell.times.plain, cell.times.speculative)
        ]
        logs.append(np.log(sums[0] / sums[1]))
    return float(np.mean(logs[1] >= logs[0]))


def report(noise: Noise, like: Cell, trials: int) -> str:
    lines = [
        f"scatter: {100 * noise.pass_deviation:.1f} % of a pass, {100 * noise.request_deviation:.1f} % of a request "
        f"within its pass, {100 * noise.speedup_deviation:.1f} % of a repeat's speedup ({len(noise.repeats)} repeats)",
        f"{trials} gates each, threshold {100 * _SPEEDUP.tolerance:g} %, level {100 * timed.ALPHA:g} % over all cells",
        "",
        "| repeats | cells | no change: REGRESSION | no change: CANNOT JUDGE | 10 % loss: REGRESSION "
        "| no change: significant | … by bootstrap |",
        "|---|---|---|---|---|---|---|",
    ]
    for cells in CELLS:
        for repeats in REPEATS:
            size = {"repeats": repeats, "prompts": PROMPTS, "cells": cells, "trials": trials}
            same = simulate(noise, like, loss=0.0, **size)  # type: ignore[arg-type]
            lost = simulate(noise, like, loss=LOSS, **size)  # type: ignore[arg-type]
            shares = (same.regression, same.cannot_judge, lost.regression, same.significant, same.bootstrap)
            text = " | ".join(f"{100 * s:.1f} %" for s in shares)
            lines.append(f"| {repeats} | {cells} | {text} |")
    return "\n".join(lines)


def read_runs(paths: Sequence[Path]) -> list[Baseline]:
    return [read_snapshot(p) if p.is_dir() else read_baseline(p) for p in paths]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m spectune.gating.calibration", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories or baseline files to take the noise from")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the scatter")
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    runs = read_runs(options.runs)
    print(report(measured_noise(runs).scaled(options.scale), runs[0].cells[0], options.trials))


if __name__ == "__main__":
    main()
