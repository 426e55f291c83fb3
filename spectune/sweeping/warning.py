"""What may be wrong with a measured cell. Each warning is "name: what was seen; what to do"."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from spectune.sweeping.cell import CellSpec, OutputCheck, PassResult
from spectune.sweeping.drafter_names import has_random_weights
from spectune.sweeping.figures import decode_rate
from spectune.sweeping.synthetic import expected_length

SHORT_OUTPUT = 16  # tokens
LOW_OCCUPANCY = 0.5  # share of decoded tokens
UNSTABLE = 0.10  # spread between repeats, relative


def cell_warnings(spec: CellSpec, passes: Sequence[PassResult], check: OutputCheck | None) -> tuple[str, ...]:
    """All warnings that follow from the passes alone."""
    found = (
        _synthetic(spec),
        _random_weights(spec),
        _outputs_short(spec, passes),
        _low_occupancy(passes),
        *(_unstable(spec, passes, mode) for mode in ("plain", "speculative")),
        _nothing_drafted(passes) if spec.k else None,
        _tokens_differ(check),
    )
    return tuple(text for text in found if text)


def _synthetic(spec: CellSpec) -> str | None:
    if spec.synthetic is None:
        return None
    return (
        f"synthetic-acceptance: forced to a length of {expected_length(spec.synthetic):.2f} at depth {spec.k}, "
        "not measured, and the output is not the target's; times are real"
    )


def _random_weights(spec: CellSpec) -> str | None:
    names = [name for name in (spec.target, spec.drafter) if has_random_weights(name)]
    # Of a grown pair, and with synthetic acceptance, only the text means nothing.
    if not names or spec.synthetic is not None or spec.target.startswith("grown:"):
        return f"random-weights: {' and '.join(names)}: the text means nothing" if names else None
    return (
        f"random-weights: {' and '.join(names)}: neither the text nor its acceptance means anything; "
        "add --synthetic-acceptance, or grow the target with --grown-pair"
    )


def _outputs_short(spec: CellSpec, passes: Sequence[PassResult]) -> str | None:
    typical = median(r.output_tokens for p in passes for r in p.requests)
    if typical >= min(SHORT_OUTPUT, spec.max_new_tokens):
        return None
    return f"outputs-short: half of the outputs have at most {typical:g} tokens; add --ignore-eos or prompts"


def _low_occupancy(passes: Sequence[PassResult]) -> str | None:
    decoded = sum(r.output_tokens - 1 for p in passes for r in p.requests)
    full = sum(r.full_tokens for p in passes for r in p.requests)
    if not decoded or full >= LOW_OCCUPANCY * decoded:
        return None
    return (
        f"low-occupancy: only {full / decoded:.0%} of the tokens were decoded with every slot busy; "
        "use more prompts or a smaller batch"
    )


def _unstable(spec: CellSpec, passes: Sequence[PassResult], mode: str) -> str | None:
    portions: dict[int, list[float]] = {}  # repeats over the same prompts
    for p in passes:
        if p.mode == mode and (rate := decode_rate([p], spec.batch)) is not None:
            portions.setdefault(p.repeat // spec.repeats, []).append(rate)
    spread = max(((max(rates) - min(rates)) / median(rates) for rates in portions.values()), default=0.0)
    if spread <= UNSTABLE:
        return None
    return f"unstable: {mode} decoding varied by {spread:.0%} between repeats; keep the machine free and repeat"


def _nothing_drafted(passes: Sequence[PassResult]) -> str | None:
    rounds = [c for p in passes if p.mode == "speculative" for r in p.requests for c in r.rounds]
    if not rounds or any(c.drafted for c in rounds):
        return None
    return "nothing-drafted: the drafter offered no token in any round"


def _tokens_differ(check: OutputCheck | None) -> str | None:
    if check is None or check.verdict == "identical":
        return None
    if check.verdict == "numeric ties":
        return (
            "numeric-ties: some outputs part from plain decoding where rounding decides between near-equal logits; "
            "--dtype float32 shows them identical"
        )
    worst = next(d for d in check.differences if not d.is_tie)
    return (
        f"tokens-differ: {worst.id} parts from plain decoding at output token {worst.position}, "
        f"{worst.gap:.3g} below the best logit where rounding explains {worst.noise:.3g}; this result is wrong"
    )
