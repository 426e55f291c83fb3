"""The plan: the full grid of cells, in an order that depends on the options alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectune.errors import UsageError
from spectune.speedup.precision import parse_precision
from spectune.suites.prompt import Suite
from spectune.sweeping.cell import CellSpec, ModelInfo, Rule, Sampling
from spectune.sweeping.drafter_names import has_random_weights, refuse_block
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.recording import recorded
from spectune.sweeping.synthetic import synthetic_rates

NO_WEIGHTS = "none"  # drafter_digest of a drafter without weights: its name says all


def plan_cells(
    options: SweepOptions,
    target: ModelInfo,
    drafters: Mapping[str, ModelInfo | None],
    suites: Sequence[Suite],
    *,
    sampling: Sampling,
    chat_template: bool | None,
) -> tuple[CellSpec, ...]:
    """Suites x batches x drafters x ks. `drafters` maps each name of `options.drafts` to its facts.

    Raises UsageError for a rule that does not fit the sampling or a drafter, and for two suites of one name.
    """
    names = [suite.name for suite in suites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two suites are called {twice!r}", "rename one of the files")
    rule = choose_rule(options.rule, sampling)
    for name in options.drafts:
        refuse_block(name, rule)
    precision = None if options.precision is None else parse_precision(options.precision)
    wanted = options.synthetic_acceptance
    rates = None if wanted is None else synthetic_rates(wanted, max(options.ks))
    # Random weights stop at random places, and so would every length that a cell measures.
    ignore_eos = options.ignore_eos or any(map(has_random_weights, (options.target, *options.drafts)))
    return tuple(
        CellSpec(
            target=options.target,
            target_digest=target.digest,
            drafter=drafter,
            drafter_digest=info.digest if info else NO_WEIGHTS,
            suite=suite.name,
            suite_digest=suite.digest,
            k=k,
            batch=batch,
            rule=rule,
            sampling=sampling,
            seed=options.seed,
            max_new_tokens=options.max_new_tokens,
            ignore_eos=ignore_eos,
            chat_template=chat_template,
            dtype=target.dtype,
            device=target.device,
            draft_device=info.device if info else target.device,
            repeats=options.repeats,
            graphs=recorded(target.device, options.graphs),
            synthetic=None if rates is None or k == 0 else rates[:k],
            precision=precision,
        )
        for suite in suites
        for batch in options.batches
        for drafter, info in ((name, drafters[name]) for name in options.drafts)
        for k in options.ks
    )


def choose_rule(wanted: str | None, sampling: Sampling) -> Rule:
    """Greedy at temperature 0; above it, speculative sampling unless another rule is wanted."""
    if sampling.greedy:
        if wanted not in (None, "greedy"):
            raise UsageError(f"rule {wanted!r} needs a temperature above 0", "leave --rule out, or add --temperature 1")
        return "greedy"
    match wanted:
        case None | "speculative":
            return "speculative"
        case "block":
            return "block"
        case "match":
            return "match"
        case "typical":
            return "typical"
        case _:
            raise UsageError(
                f"rule {wanted!r} does not fit temperature {sampling.temperature:g}", "use --temperature 0"
            )
