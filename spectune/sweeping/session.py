"""One `spectune sweep` from options to outcome: suites, engine, plan, run directory, theory card, sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spectune import __version__
from spectune.engines.engine import Engine, Request
from spectune.errors import UsageError
from spectune.interrupts import interrupts
from spectune.measuring.bandwidth import peak_reading
from spectune.measuring.bytes_model import TheoryCard, theory_card
from spectune.measuring.device_memory import total_memory
from spectune.measuring.fingerprint import fingerprint
from spectune.suites.load import load_suite
from spectune.suites.prompt import Suite
from spectune.sweeping.card import card_text
from spectune.sweeping.cell import CellSpec, ModelInfo, Reading, RunInfo, Sampling
from spectune.sweeping.command import resume_command, sweep_command
from spectune.sweeping.estimate import Estimate, estimate, mean_context
from spectune.sweeping.fast_plan import is_worth_it, survey
from spectune.sweeping.fast_sweep import run_fast
from spectune.sweeping.gauge import DeviceGauge
from spectune.sweeping.listener import Listener, Silent
from spectune.sweeping.measure import timestamp
from spectune.sweeping.memory import Device, Load, infeasible, load_of, memory_lines, plan_memory
from spectune.sweeping.opening import check_free, default_path, open_run
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.plan import plan_cells
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.sweep import Interrupted, Sweep, SweepOutcome


def run(
    options: SweepOptions,
    *,
    engine: Engine | None = None,
    output: Path | str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    allow_env_mismatch: bool = False,
    listener: Listener | None = None,
) -> SweepOutcome:
    """Plan the grid and measure what `output` lacks of it; only plan it where `dry_run` is set.

    `engine` None loads the native one. `output` None makes a new folder in runs/. A `resume` where there is
    no run yet starts it, so that several processes can be started with one command.

    Raises UsageError for options, suites, drafts or a run directory that do not fit, before anything is
    measured; SpectuneError where the disk is full or the engine breaks down; Interrupted on Ctrl-C and
    SIGTERM. A cell that fails is part of the outcome.
    """
    listener = listener or Silent()
    if resume and output is None:
        raise UsageError("which run is to be resumed?", "name its folder with --output")
    directory = RunDirectory(output or default_path(options.target))
    again = resume_command(options, directory.path)
    if not dry_run:
        check_free(directory, resume=resume, again=again)
    suites = _load_suites(options, listener)
    job = prepare(options, engine or load_engine(options), suites)
    for drafter in options.drafts:
        for note in job.engine.drafter_notes(drafter):
            listener.note(f"{drafter}: {note}")
    memory = tuple(memory_lines(job.loads.values(), job.where))
    unfit = {key: why for key, load in job.loads.items() if (why := infeasible(load, job.where)) is not None}
    prompts = min(len(suite.prompts) for suite in suites)
    surveyed = survey(job.plan, prompts, unfit)
    is_fast = options.plan == "fast" and is_worth_it(job.plan, len(surveyed))
    first = surveyed if is_fast else job.plan
    if dry_run:
        needs = replace(job.estimate(first), kv_bytes=job.estimate(job.plan).kv_bytes)
        outcome = SweepOutcome(first, job.card, estimate=needs, memory=memory)
        if is_fast:
            said = (
                f"fast plan: these cells of {len(job.plan)} first, with these tokens in this time, then what they and "
                "some timed rounds call for"
            )
            return replace(outcome, fast=said)
        return outcome
    environment = fingerprint(job.engine.target.device)
    info = job.info(directory.name, sweep_command(options, directory.path), environment)
    notes = open_run(
        directory,
        info.model_copy(update={"plan": first}),
        resume=resume,
        again=again,
        allow_env_mismatch=allow_env_mismatch,
    )

    def extend(plan: Sequence[CellSpec]) -> None:
        added = info.model_copy(update={"plan": tuple(plan)})
        open_run(directory, added, resume=True, again=again, allow_env_mismatch=allow_env_mismatch)

    listener.card("\n".join((card_text(job.card), *memory)))
    sweep = Sweep(
        job.plan,
        job.suites,
        job.engine,
        directory,
        DeviceGauge(job.engine.target, job.drafters, job.card.peak_bytes_per_second),
        listener,
        [f"other-environment: {note}" for note in notes],
        {key: plan_memory(load) for key, load in job.loads.items()},
        unfit,
    )
    try:
        with interrupts():
            if is_fast:
                contexts = {name: mean_context({name: own}) for name, own in job.requests.items()}
                said = run_fast(sweep, job.plan, prompts, contexts, extend).text()
                keys = {spec.key for spec in job.plan}
                mine = [spec for spec in directory.info().plan if spec.key in keys]
                return replace(replace(sweep, plan=mine).outcome(job.card), fast=said)
            sweep.run()
    except KeyboardInterrupt:
        plan = directory.info().plan if is_fast else job.plan
        done = sum(directory.is_finished(spec.key) for spec in plan)
        raise Interrupted(f"interrupted; {done} of {len(plan)} cells are finished", again) from None
    return sweep.outcome(job.card)


@dataclass(frozen=True, slots=True)
class Job:
    """A plan and all that is needed to carry it out.

    `requests` are the rendered suites, by name; `loads` what each cell puts on the device, by key.
    """

    plan: tuple[CellSpec, ...]
    suites: Mapping[str, Suite]
    requests: Mapping[str, tuple[Request, ...]]
    engine: Engine
    drafters: Mapping[str, ModelInfo | None]
    card: TheoryCard
    loads: Mapping[str, Load]
    where: Device

    def estimate(self, plan: Sequence[CellSpec]) -> Estimate:
        return estimate(plan, self.suites, self.requests, self.engine.target, self.drafters, self.card)

    def info(self, name: str, command: tuple[str, ...], environment: dict[str, object]) -> RunInfo:
        """run.json of a run that starts now."""
        return RunInfo(
            name=name,
            created_at=timestamp(),
            spectune_version=__version__,
            command=command,
            environment=environment,
            target=self.engine.target,
            drafters=dict(self.drafters),
            plan=self.plan,
        )


def prepare(options: SweepOptions, engine: Engine, suites: Sequence[Suite]) -> Job:
    """Load the drafts, plan the cells and render each suite once. Raises UsageError where they do not fit."""
    drafters = {name: engine.drafter(name) for name in options.drafts}
    plan = plan_cells(
        options,
        engine.target,
        drafters,
        suites,
        sampling=options.sampling(engine.generation_defaults() if options.model_sampling else Sampling()),
        chat_template=options.chat,
    )
    by_name = {suite.name: suite for suite in suites}
    first = {spec.suite: spec for spec in reversed(plan)}
    requests = {name: engine.render(spec, by_name[name]).requests for name, spec in first.items()}
    card = theory_card(
        engine.target,
        drafters,
        batches=options.batches,
        ks=tuple(k for k in options.ks if k),
        mean_context=mean_context(requests),
        peak=_peak(engine.target.device, options.peak_bandwidth),
    )
    loads = {spec.key: load_of(spec, requests[spec.suite], engine.target, drafters) for spec in plan}
    where = Device(engine.target.device, total_memory(engine.target.device), options.memory_fraction)
    return Job(plan, by_name, requests, engine, drafters, card, loads, where)


def load_engine(options: SweepOptions) -> Engine:
    """The native engine with the target loaded."""
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    from spectune.engines.native import NativeEngine

    return NativeEngine(
        options.target,
        dtype=options.dtype,
        device=options.device,
        draft_device=options.draft_device,
        trust_remote_code=options.trust_remote_code,
        graphs=options.graphs,
        revision=options.revision,
    )


def _load_suites(options: SweepOptions, listener: Listener) -> list[Suite]:
    suites = [
        load_suite(
            name,
            column=options.column,
            categories=options.categories,
            limit=options.prompts,
            sample_seed=options.sample_seed,
        )
        for name in options.suites
    ]
    for suite in suites:
        for note in suite.notes:
            listener.note(f"{suite.name}: {note}")
    return suites


def _peak(device: str, gigabytes_per_second: float | None) -> Reading:
    return peak_reading(device, None if gigabytes_per_second is None else gigabytes_per_second * 1e9)
