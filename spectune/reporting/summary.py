"""The summary of a run: one structure that the terminal, `--json`, the export and the page all print from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spectune.recommending.choice import Advice, Recommendation, recommend
from spectune.recommending.exports.engines import exports, expressible
from spectune.recommending.exports.export import EngineName, Export, Wanted
from spectune.recommending.exports.measured import measured_acceptance
from spectune.recommending.exports.names import target_path
from spectune.recommending.exports.schedule import batch_schedule
from spectune.recommending.mix import Mix, parse_mix
from spectune.recommending.objective import Objective, ServiceLevel
from spectune.recommending.tuning import Tuning, tune
from spectune.reporting.row import cell_row, failed_row, place
from spectune.reporting.tuning import tuning_document
from spectune.speedup.latency import PlannedK, Surfaces, planned_k, run_surfaces
from spectune.speedup.models import POOR, Fit, Quality, fit
from spectune.speedup.overlap import OverlapCheck, overlap_check
from spectune.speedup.positions import Measured, Positions, acceptance_length, fit_positions
from spectune.speedup.precision import sample_plans
from spectune.speedup.profile import Config, Profile, profiles
from spectune.speedup.run import Run, load_run
from spectune.speedup.uncertainty import LEVEL, RESAMPLES
from spectune.sweeping.cell import CellResult
from spectune.sweeping.drafter_names import drafts_trees
from spectune.sweeping.synthetic import expected_length
from spectune.verifying.record import Audit, read_audits
from spectune.verifying.stamp import Stamp, stamp, stamps

FORMULAS = {
    "card": "(1 + β·K) / (1 + K·T_d/T_t), β measured at that K",
    "iid": "(1 − α^{K+1}) / ((1 − α)·(1 + K·T_d/T_t)), one α for all K",
    "full": "AL(K)·T_t / (K·T_d + t_verify + t_overhead), AL(K) = 1 + Σ_{i≤K} Π_{j≤i} a·g^((j-1)^p)",
}


@dataclass(frozen=True, slots=True)
class PositionGroup:
    """Acceptance by position of one drafter and rule on one suite, over its K and batches."""

    suite: str
    drafter: str
    rule: str
    found: Positions


@dataclass(frozen=True)
class Summary:
    """`beyond` is the overall choice among all configurations, where the engine that was asked for has no such method.
    `profiles` and everything else are then of those that it has.
    """

    run: Run
    profiles: tuple[Profile, ...]
    recommendation: Recommendation
    exports: tuple[Export, ...]  # for the overall choice
    batch_exports: dict[int, tuple[Export, ...]]  # for batches where another configuration is better
    audits: tuple[Audit, ...] = ()
    mix: Mix | None = None
    goal: tuple[Objective, ServiceLevel | None] | None = None
    beyond: Advice | None = None

    @cached_property
    def tuning(self) -> Tuning:
        """By the goal; without one the candidates are ranked by throughput."""
        objective, slo = self.goal or ("throughput", None)
        return tune(self.run, self.profiles, mix=self.mix, objective=objective, slo=slo)

    @cached_property
    def fit(self) -> Fit:
        return fit(self.profiles)  # on first use: `recommend` needs none

    @cached_property
    def surfaces(self) -> Surfaces:
        return run_surfaces(self.profiles)

    @cached_property
    def planned(self) -> tuple[PlannedK, ...]:
        return tuple(planned_k(c, self.surfaces, self.profiles) for c in self.fit.curves)

    @cached_property
    def positions(self) -> tuple[PositionGroup, ...]:
        """Of drafters that draft chains: a tree's depths depend on how wide it is."""
        groups: dict[tuple[str, str, str], list[CellResult]] = {}
        for p in self.profiles:
            if p.excluded is None and not drafts_trees(p.spec.drafter):
                groups.setdefault((p.spec.suite, p.spec.drafter, p.spec.rule), []).append(p.cell)
        return tuple(PositionGroup(*name, fit_positions(cells)) for name, cells in groups.items())

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Finished cells in the order of the run."""
        return [cell_row(p, q) for p, q in zip(self.profiles, self.fit.predictions, strict=True)]

    @cached_property
    def stamps(self) -> tuple[Stamp, ...]:
        """Whether the run's drafters are known to be lossless."""
        return stamps(self.run.info.plan, self.audits, self.run.path)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader must know before any number: an unfinished plan, what was forced, what had random weights."""
        return caveats(self.run)

    @property
    def choice_stamp(self) -> Stamp | None:
        """The same for the overall choice, at its K alone; None where that is OFF."""
        choice = self.recommendation.overall.choice
        chosen = [p.spec for p in self.profiles if p.config == choice]
        return stamp(chosen, self.audits, self.run.path) if chosen else None

    @property
    def failed_rows(self) -> list[dict[str, Any]]:
        return [failed_row(f) for f in self.run.failed]


def caveats(run: Run) -> tuple[str, ...]:
    """A line for an unfinished plan, one for synthetic acceptance, and one for weights that nobody trained."""
    info = run.info
    found = []
    missing = len(info.plan) - len(run.cells) - len(run.failed)
    if run.fast is not None and run.fast.complete is False:
        found.append(
            f"UNFINISHED: the fast plan of {run.fast.grid_cells} cells has not chosen yet what to measure; the same "
            "`spectune sweep` with --resume goes on."
        )
    elif missing > 0:
        found.append(f"UNFINISHED: {missing} cells are to be measured yet; `spectune sweep` with --resume goes on.")
    forced = [spec.synthetic for spec in info.plan if spec.synthetic is not None]
    if forced:
        rates = max(forced, key=len)
        found.append(
            f"SYNTHETIC ACCEPTANCE: forced to a length of {expected_length(rates):.2f} at depth {len(rates)}, "
            "not measured; times and speedups hold for drafts that are accepted that often."
        )
    models = [info.target, *(m for m in info.drafters.values() if m is not None)]
    if untrained := [m.name for m in models if m.weights == "random"]:
        found.append(f"RANDOM WEIGHTS: {', '.join(untrained)}: only times mean anything, texts do not.")
    if info.target.weights == "grown":
        found.append(f"GROWN TARGET: {info.target.name} is a draft with random layers behind it, not a trained model.")
    return tuple(found)


def summarise(
    path: Path,
    *,
    engine: EngineName | None = None,
    allow_empty: bool = False,
    mix: str | None = None,
    goal: tuple[Objective, ServiceLevel | None] | None = None,
) -> Summary:
    """Read a run and analyse all of it, for a `mix` of suites and a `goal` if given. Raises what `load_run` raises.

    The settings are those of the goal's choice, or without a goal of the overall one. With `engine` only what it can
    express is chosen from, unless that is nothing.
    """
    run = load_run(path, allow_empty=allow_empty)
    found = profiles(run)
    shares = None if mix is None else parse_mix(mix, (p.spec.suite for p in found))
    recommendation = recommend(run, found, mix=shares)
    audits = read_audits(path)
    if not found:
        return Summary(run, found, recommendation, (), {}, audits)
    beyond = None
    own = [p for p in found if engine is None or p.spec.k == 0 or expressible(p.config, engine)]
    if any(p.spec.k for p in own) and len(own) < len(found):
        choice = recommendation.overall.choice
        beyond = recommendation.overall if choice and choice not in {p.config for p in own} else None
        found, recommendation = tuple(own), recommend(run, own, mix=shares)
    overall = recommendation.overall.choice
    if goal is not None:
        summary = Summary(run, found, recommendation, (), {}, audits, shares, goal, beyond)
        best = summary.tuning.answers[0].choice
        wanted = _wanted(best.config, run, found, recommendation) if best and best.config else None
        return replace(summary, exports=exports(wanted, engine=engine))
    others = {
        a.batch: exports(_wanted(a.choice, run, found, recommendation), engine=engine)
        for a in recommendation.by_batch
        if a.batch is not None and a.choice is not None and a.choice != overall
    }
    settings = exports(_wanted(overall, run, found, recommendation) if overall else None, engine=engine)
    return Summary(run, found, recommendation, settings, others, audits, shares, beyond=beyond)


def _wanted(choice: Config, run: Run, found: Sequence[Profile], recommendation: Recommendation) -> Wanted:
    target, draft = run.info.target, run.info.drafters.get(choice.drafter)
    return Wanted(
        choice,
        target_path(target.name),
        found[0].spec.sampling.temperature,
        batch_schedule(choice, recommendation.by_batch),
        measured_acceptance(choice, found),
        None if draft is None else draft.vocab_size == target.vocab_size,
    )


def recommendation_document(summary: Summary) -> dict[str, Any]:
    """What `recommend --json` prints and recommendation.json holds."""
    found = summary.recommendation
    return {
        **_head(summary),
        "overall": _advice(found.overall),
        "beyond_engine": _advice(summary.beyond) if summary.beyond else None,
        "by_batch": [_advice(a) for a in found.by_batch],
        "by_suite": [_advice(a) for a in found.by_suite],
        "by_suite_and_batch": [_advice(a) for a in found.by_place],
        **tuning_document(summary.tuning, asked=summary.goal is not None),
        "flags": [asdict(e) for e in summary.exports],
        "flags_by_batch": {str(batch): [asdict(e) for e in own] for batch, own in summary.batch_exports.items()},
        "excluded": [{"key": e.key, **place(e.spec), "reason": e.reason} for e in found.excluded],
        "failed": summary.failed_rows,
        "losslessness": {
            "choice": _stamp(summary.choice_stamp) if summary.choice_stamp else None,
            "drafters": [_stamp(s) for s in summary.stamps],
        },
        "warnings": _warnings(summary),
        "method": {
            "interval": f"{LEVEL:.0%} percentile bootstrap over prompts and repeats, {RESAMPLES} resamples",
            "over_suites": "time for the same number of tokens of each suite",
            "over_batches": "each batch busy for the same time under plain decoding",
            "model_used": None,  # measured speeds decide
        },
    }


def fit_document(summary: Summary, *, precision: float | None = None) -> dict[str, Any]:
    """What `fit --json` prints and fit.json holds; with `precision` the prompts that it takes."""
    found = summary.fit
    samples = sample_plans([p.cell for p in summary.profiles if p.excluded is None], precision) if precision else ()
    return {
        **_head(summary),
        "models": {
            "card": {"formula": FORMULAS["card"], **asdict(found.card)},
            "iid": {"formula": FORMULAS["iid"], **asdict(found.iid)},
            "full": {"formula": FORMULAS["full"], **asdict(found.full)},
            "held_out": {"what": "full, acceptance fitted without the cell", **asdict(found.held_out)},
        },
        "better": found.better,
        "used_by_recommendation": "neither: measured speeds decide",
        "poor_above": POOR,
        "curves": [asdict(c) for c in found.curves],
        "positions": [asdict(g) for g in summary.positions],
        "latency": asdict(summary.surfaces),
        "samples": [{**place(s.spec), **asdict(s.plan)} for s in samples],
        "planned_k": [asdict(p) for p in summary.planned],
        "predictions": [
            {
                **place(p.spec),
                **asdict(q),
                "acceptance_length": _or_none(acceptance_length(p.cell)),
                "overlap": _or_none(overlap_check(p.cell)),
            }
            for p, q in zip(summary.profiles, found.predictions, strict=True)
        ],
        "failed": summary.failed_rows,
    }


def as_json(document: dict[str, Any]) -> str:
    """Strict JSON: no NaN and no Infinity can be in it."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def verdict_line(advice: Advice) -> str:
    """The answer in a few words."""
    return "OFF: decode without speculation" if advice.choice is None else str(advice.choice)


def quality_line(name: str, quality: Quality) -> str:
    """A model's error in words."""
    if quality.rmse is None or quality.median_error is None or quality.p90_error is None:
        return f"{name}: nothing to compare with"
    cells = f"{quality.cells} cell{'s' if quality.cells > 1 else ''}"
    text = f"{name}: RMSE {quality.rmse:.2f} over {cells}, error {quality.median_error:.0%} median"
    text += f" and {quality.p90_error:.0%} P90"
    return text + ("; poor: do not predict with it" if quality.poor else "")


def cell_counts(summary: Summary) -> dict[str, int]:
    run = summary.run
    return {"planned": len(run.info.plan), "finished": len(run.cells), "failed": len(run.failed)}


def _head(summary: Summary) -> dict[str, Any]:
    info = summary.run.info
    return {
        "schema_version": 1,
        "run": info.name,
        "target": info.target.name,
        "caveats": list(summary.caveats),
        "spectune_version": info.spectune_version,
        "cells": cell_counts(summary),
    }


def _advice(advice: Advice) -> dict[str, Any]:
    sped = advice.speedup
    return {
        "suite": advice.suite,
        "batch": advice.batch,
        "speculate": advice.choice is not None,
        "choice": asdict(advice.choice) if advice.choice else None,
        "verdict": advice.verdict,
        "best": asdict(advice.best) if advice.best else None,
        "speedup": asdict(sped) if sped else None,
        "flat_optimum": [asdict(c) for c in advice.flat],
        "ranking": [{**asdict(o.config), **asdict(o.speedup)} for o in advice.ranking],
        "why": list(advice.why),
    }


def _or_none(found: Measured | OverlapCheck | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _stamp(found: Stamp) -> dict[str, Any]:
    return {**asdict(found), "audits": [a.key for a in found.audits]}


def _warnings(summary: Summary) -> list[dict[str, Any]]:
    """Each warning once, with the cells that carry it."""
    cells: dict[str, list[str]] = {}
    for p in summary.profiles:
        for note in p.notes:
            cells.setdefault(note, []).append(p.cell.key)
    return [{"warning": note, "cells": keys} for note, keys in cells.items()]
