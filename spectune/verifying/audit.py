"""One `spectune verify` from options to outcome: every (drafter, K, batch, suite) is audited and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectune import __version__
from spectune.decoding.decoder import Run
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine
from spectune.errors import UsageError
from spectune.interrupts import Interrupts, interrupts
from spectune.suites.load import load_suite
from spectune.suites.prompt import Suite
from spectune.sweeping.cell import CellSpec, Sampling
from spectune.sweeping.measure import timestamp
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.plan import plan_cells
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.sweep import Interrupted, failure_message
from spectune.verifying.conclude import conclude
from spectune.verifying.decode import decode_plainly, decode_speculatively, reference_rule
from spectune.verifying.identity import check_identity
from spectune.verifying.progress import Progress
from spectune.verifying.record import FOLDER, Audit, AuditSpec, read_audit, write_audit
from spectune.verifying.sampled import TESTS, check_distribution

ALPHA = 1e-4  # the chance that a whole call finds a bias where there is none
SAMPLES = 3000


@dataclass(frozen=True, slots=True)
class Failure:
    """An audit that broke off."""

    cell: CellSpec
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call found; `directory` is the run that keeps it, if one was named."""

    audits: tuple[Audit, ...]
    failures: tuple[Failure, ...] = ()
    directory: Path | None = None

    @property
    def exit_code(self) -> int:
        """0 lossless, 1 not, 3 cannot judge, 4 an audit broke off; a finding outweighs the others."""
        verdicts = {audit.verdict for audit in self.audits}
        if verdicts & {"FAIL", "lossy"}:
            return 1
        if self.failures:
            return 4
        return 3 if "cannot judge" in verdicts else 0


@dataclass(slots=True)
class _Job:
    """The engine, the suites, and plain outputs that several audits share."""

    engine: NativeEngine
    suites: dict[str, Suite]
    alpha: float  # of each single test
    progress: Progress
    plain: dict[tuple[str, int], Run] = field(default_factory=dict)

    def requests(self, cell: CellSpec) -> tuple[Request, ...]:
        return self.engine.render(cell, self.suites[cell.suite]).requests

    def planned_tokens(self, spec: AuditSpec) -> int:
        """About how many tokens an audit decodes."""
        once = sum(r.max_new_tokens for r in self.requests(spec.cell))
        # Plain decoding of a place is shared, and slow; the distribution test checks each token once more.
        return 2 * once + 2 * spec.samples

    def audit(self, spec: AuditSpec) -> Audit:
        cell, began = spec.cell, time.perf_counter()
        requests = self.requests(cell)
        tokens = self.progress.tokens
        place = (cell.suite, cell.batch)
        if place not in self.plain:
            self.plain[place] = decode_plainly(self.engine, cell, requests, tokens)
        run, _ = decode_speculatively(self.engine, cell, requests, tokens, rule=reference_rule(cell))
        identity = check_identity(self.engine, cell, requests, self.plain[place], run)
        distribution = None
        if not cell.sampling.greedy:
            distribution = check_distribution(
                self.engine,
                cell,
                [r for r in requests if r.repeats is None],
                samples=spec.samples,
                alpha=self.alpha,
                on_tokens=tokens,
            )
        verdict, reason = conclude(cell, identity, distribution)
        return Audit(
            key=spec.key,
            spec=spec,
            audited_at=timestamp(),
            spectune_version=__version__,
            seconds=time.perf_counter() - began,
            verdict=verdict,
            reason=reason,
            detectable=distribution.detectable if distribution else None,
            identity=identity,
            distribution=distribution,
        )


def audit(
    options: SweepOptions,
    *,
    samples: int = SAMPLES,
    engine: NativeEngine | None = None,
    output: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Audit every combination that the options name, and keep each result in the run `output` at once.

    Args:
        samples: tokens of each distribution test.
        engine: reuse loaded models; None loads them.
        resume: take what `output` already holds, if this version of spectune judged it at the same level.

    Raises:
        UsageError: options, models, suites or a run directory that do not fit, before anything is decoded.
        Interrupted: Ctrl-C or SIGTERM; what was finished is kept.
    """
    if options.max_new_tokens < 2:
        raise UsageError("the first new token is never drafted", "use --max-new-tokens 2 or more")
    if options.synthetic_acceptance is not None:
        raise UsageError(
            "synthetic acceptance is not lossless: there is nothing to verify", "leave --synthetic-acceptance out"
        )
    if samples < 1:
        raise UsageError(f"--samples must be at least 1, not {samples}")
    if resume and output is None:
        raise UsageError("--resume needs a run to go on with", "name it with -o")
    progress = progress or Progress()
    directory = None if output is None else RunDirectory(output)
    _check_free(directory)
    suites = _load_suites(options, progress)
    engine = engine or load_engine(options)
    _check_target(directory, engine)
    specs = plan(options, engine, suites, samples)
    for name in options.drafts:
        for note in engine.drafter_notes(name):
            progress.note(f"{name}: {note}")
    tests = TESTS * sum(spec.samples > 0 for spec in specs)
    job = _Job(engine, {s.name: s for s in suites}, ALPHA / max(1, tests), progress)
    earlier = directory if resume else None
    audits: list[Audit] = []
    failures: list[Failure] = []
    planned = [0 if _kept(earlier, spec, job.alpha) else job.planned_tokens(spec) for spec in specs]
    progress.begin(len(specs), sum(planned))
    try:
        with interrupts() as stop:
            for number, spec in enumerate(specs, 1):
                stop.check()
                progress.start(spec.cell)
                # Looked up only now: another process may fill the same run.
                kept = _kept(earlier, spec, job.alpha)
                found = kept or _attempt(job, spec, stop)
                if isinstance(found, Audit):
                    if directory is not None and kept is None:
                        write_audit(directory, found)
                    audits.append(found)
                    text = f"{'kept, ' if kept else ''}{found.verdict}: {found.reason}"
                else:
                    failures.append(found)
                    text = f"failed: {found.message}"
                progress.finished(spec.cell, text, sum(planned[:number]))
    except KeyboardInterrupt:
        where = f"; the finished ones are in {directory.path}: go on with --resume" if directory is not None else ""
        raise Interrupted(f"interrupted; {len(audits)} of {len(specs)} audits are done{where}") from None
    finally:
        progress.end()
    return Outcome(tuple(audits), tuple(failures), None if directory is None else directory.path)


def plan(options: SweepOptions, engine: NativeEngine, suites: Sequence[Suite], samples: int) -> tuple[AuditSpec, ...]:
    """Suites x batches x drafters x Ks. Loads the drafters."""
    cells = plan_cells(
        options,
        engine.target,
        {name: engine.drafter(name) for name in options.drafts},
        suites,
        sampling=options.sampling(engine.generation_defaults() if options.model_sampling else Sampling()),
        chat_template=options.chat,
    )
    return tuple(AuditSpec(cell=cell, samples=0 if cell.sampling.greedy else samples) for cell in cells)


def load_engine(options: SweepOptions) -> NativeEngine:
    """The native engine with the target loaded."""
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    return NativeEngine(
        options.target,
        dtype=options.dtype,
        device=options.device,
        draft_device=options.draft_device,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        graphs=options.graphs,
    )


def _attempt(job: _Job, spec: AuditSpec, stop: Interrupts) -> Audit | Failure:
    """An audit that breaks off does not end the call."""
    try:
        return job.audit(spec)
    except UsageError:
        raise
    except Exception as error:
        stop.check()  # the error may be what an interruption has become
        failure = Failure(spec.cell, failure_message(error))
    # Only now: the exception's traceback has kept its tensors alive.
    job.engine.release()
    return failure


def _kept(directory: RunDirectory | None, spec: AuditSpec, alpha: float) -> Audit | None:
    """An audit of an earlier call that this one need not repeat."""
    audit = None if directory is None else read_audit(directory, spec.key)
    if audit is None or audit.spectune_version != __version__:
        return None
    same = audit.distribution is None or math.isclose(audit.distribution.alpha, alpha)
    return audit if same else None


def _load_suites(options: SweepOptions, progress: Progress) -> list[Suite]:
    suites = [
        load_suite(name, column=options.column, categories=options.categories, limit=options.prompts)
        for name in options.suites
    ]
    for suite in suites:
        for note in suite.notes:
            progress.note(f"{suite.name}: {note}")
    return suites


def _check_free(directory: RunDirectory | None) -> None:
    """A folder with other things in it is no place for a result."""
    if directory is None:
        return
    foreign = [name for name in directory.foreign_files() if name != FOLDER]
    if foreign:
        raise UsageError(f"{directory.path} is no run and not empty (it holds {foreign[0]})", "choose another --output")


def _check_target(directory: RunDirectory | None, engine: NativeEngine) -> None:
    if directory is None or not directory.exists():
        return
    there = directory.info().target
    if there.digest != engine.target.digest:
        raise UsageError(f"{directory.path} is a run of {there.name}, not of {engine.target.name}", "use another -o")
