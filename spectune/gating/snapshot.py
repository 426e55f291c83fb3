"""From a run directory to what a gate compares."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from spectune import __version__
from spectune.errors import UsageError
from spectune.gating.baseline import Baseline, Cell, Failure, PassTimes, RequestCounts, Times
from spectune.importing.record import is_imported
from spectune.speedup.profile import profile
from spectune.speedup.run import Run, load_run
from spectune.speedup.timing import has_full_rounds, tpot
from spectune.sweeping.cell import CellResult, PassResult, RequestResult
from spectune.sweeping.figures import tokens_and_seconds

_HARDWARE = ("os", "machine", "wsl", "cpu", "cpu_flags", "physical_cores", "usable_cores", "torch_threads")
_GPU = ("name", "memory_bytes", "power_limit_watts", "mig")
_SOFTWARE = ("python", "torch", "transformers", "triton", "cuda")


def read_snapshot(path: Path, *, exact_only: bool = False) -> Baseline:
    """The snapshot of a run directory; `exact_only` leaves the times out. Raises what `load_run` raises."""
    if is_imported(path):
        raise UsageError(f"{path} holds results of other tools, without seeds and requests", "gate a run of `sweep`")
    return snapshot(load_run(path, allow_empty=True), exact_only=exact_only)


def snapshot(run: Run, *, exact_only: bool = False) -> Baseline:
    done = {c.key for c in run.cells} | {f.key for f in run.failed}
    return Baseline(
        run=run.info.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spectune_version=__version__,
        hardware=hardware(run.info.environment),
        software=software(run.info.environment),
        cells=tuple(_cell(c, exact_only) for c in run.cells),
        failures=tuple(Failure(spec=f.spec, reason=f.reason, message=f.message) for f in run.failed),
        unfinished=tuple(spec for spec in run.info.plan if spec.key not in done),
    )


def hardware(environment: Mapping[str, object]) -> dict[str, object]:
    """What times depend on and code does not touch. Library versions are not in it: a gate may be about them."""
    facts = {key: environment.get(key) for key in _HARDWARE}
    kind, _, index = str(environment.get("device")).partition(":")
    facts["device"] = kind
    if kind == "cuda":
        first = int(index) if index.isdecimal() else 0
        facts["gpu"] = [{key: gpu.get(key) for key in _GPU} for gpu in _gpus(environment)[first : first + 1]]
    return facts


def software(environment: Mapping[str, object]) -> dict[str, object]:
    facts = {key: environment.get(key) for key in _SOFTWARE}
    facts["driver"] = next((gpu.get("driver") for gpu in _gpus(environment)), None)
    return facts


def _gpus(environment: Mapping[str, object]) -> list[dict[str, object]]:
    """As far as they can be understood: the environment is free-form."""
    gpus = environment.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _cell(cell: CellResult, exact_only: bool) -> Cell:
    speculative, plain = _repeats(cell, "speculative"), _repeats(cell, "plain")
    counts = [_counts([r for p in passes for r in p.requests]) for passes in speculative]
    times = None
    if not exact_only:
        full, ids = has_full_rounds(cell), [r.id for r in counts[0]]
        times = Times(
            plain=tuple(_times(passes, ids, full) for passes in plain),
            speculative=tuple(_times(passes, ids, full) for passes in speculative),
        )
    return Cell(
        spec=cell.spec,
        output_check=cell.output_check.verdict if cell.output_check else None,
        repeatable=all(c == counts[0] for c in counts),
        no_speed=profile(cell).excluded,
        target_forwards=sum(
            p.target_forwards for p in cell.passes if p.mode == "speculative" and p.repeat % cell.spec.repeats == 0
        ),
        requests=counts[0],
        times=times,
    )


def _repeats(cell: CellResult, mode: str) -> list[list[PassResult]]:
    """The passes of every repeat: one over each portion of the prompts that the cell took."""
    found: list[list[PassResult]] = [[] for _ in range(cell.spec.repeats)]
    for done in sorted(cell.passes, key=lambda p: p.repeat):
        if done.mode == mode:
            found[done.repeat % cell.spec.repeats].append(done)
    return found


def _counts(requests: list[RequestResult]) -> tuple[RequestCounts, ...]:
    """By id, since batches may finish in another order."""
    return tuple(
        RequestCounts(
            id=r.id,
            prompt=r.prompt_id,
            output_digest=r.output_digest,
            output_tokens=r.output_tokens,
            counts=tuple(sorted((c.drafted, c.accepted, c.count) for c in r.rounds)),
        )
        for r in sorted(requests, key=lambda r: r.id)
    )


def _times(passes: list[PassResult], ids: list[str], full: bool) -> PassTimes:
    requests = {r.id: r for p in passes for r in p.requests}
    if sorted(requests) != ids:
        raise UsageError("the passes of a cell decoded different requests", "sweep the cell again")
    shares = {r.id: pair for p in passes for r, pair in zip(p.requests, tokens_and_seconds(p, full=full), strict=True)}
    rates = [shares[i] for i in ids]
    per_token = [tpot(requests[i]) for i in ids]
    return PassTimes(
        tokens=tuple(tokens for tokens, _ in rates),
        seconds=tuple(_rounded(seconds) for _, seconds in rates),
        ttft_seconds=tuple(_rounded(requests[i].ttft_seconds) for i in ids),
        tpot_seconds=tuple(None if t is None else _rounded(t) for t in per_token),
    )


def _rounded(seconds: float) -> float:
    """Six digits: far below any scatter, and the file stays small."""
    return float(f"{seconds:.6g}")
