"""From what was found to a verdict. Pure."""

from __future__ import annotations

from spectune.sweeping.cell import LOSSY_RULES, CellSpec
from spectune.verifying.record import DistributionCheck, IdentityCheck, Parting, Verdict

WANTED = 0.1  # the total-variation bias per token that an audit must be able to find


def conclude(spec: CellSpec, identity: IdentityCheck, distribution: DistributionCheck | None) -> tuple[Verdict, str]:
    """The verdict on one (target, drafter, rule, settings), and the reason in a few words."""
    if identity.failures:
        first = identity.failures[0]
        count = len({p.id for p in identity.failures})
        where = f"the first at position {first.position} of {first.id}"
        return "FAIL", f"{count} of {identity.requests} outputs are wrong, {where}"
    lossy = spec.rule in LOSSY_RULES
    if distribution is not None and distribution.rejected and not lossy:
        names = ", ".join(f"{name} (p {distribution.chances[name]:.1e})" for name in distribution.rejected)
        return "FAIL", f"not the target's distribution: {names}; off by about {distribution.measured:.3f} per token"
    if lossy and distribution is not None:
        return "lossy", f"by design; off by about {distribution.measured:.3f} per token"
    if identity.drafted == 0 or (distribution is not None and distribution.drafted == 0):
        return "cannot judge", "nothing was drafted, so nothing was tested; use other prompts or more new tokens"
    if distribution is not None and spec.rule != "match":
        found = distribution.detectable
        if found is None or found > WANTED:
            return "cannot judge", _too_few(distribution)
        return "consistent", f"{distribution.tokens} tokens; a bias of {found:.3f} per token would have shown"
    if identity.partings:
        parted = identity.requests - identity.identical
        return "numeric ties", f"{parted} of {identity.requests} outputs part where rounding decides"
    return "identical", f"{identity.requests} outputs, {identity.tokens} tokens"


def describe(parting: Parting) -> str:
    """Where and how an output parts, for people."""
    place = f"{parting.id}, output position {parting.position}"
    if parting.expected is None and parting.found is None:
        return f"{place}: ends at the wrong place"
    tokens = f"token {_token(parting.found)}, plain decoding has {_token(parting.expected)}"
    if parting.margin is None:
        return f"{place}: {tokens}"
    numbers = f"top-2 margin {parting.margin:.3g}, gap {parting.gap:.3g}, rounding {parting.noise:.3g}"
    return f"{place}: {tokens} ({numbers})"


def _token(token: int | None) -> str:
    return "(end)" if token is None else str(token)


def _too_few(distribution: DistributionCheck) -> str:
    found = distribution.detectable
    if found is None:
        return "no token behind the first one was emitted; use more new tokens"
    # A detectable bias falls with the square root of the sample, down to what rounding hides.
    if distribution.tolerance >= WANTED / 2:
        return f"rounding alone moves {distribution.tolerance:.3f} per token; use --dtype float32"
    need = distribution.tokens * ((found - distribution.tolerance) / (WANTED - distribution.tolerance)) ** 2
    return (
        f"{distribution.tokens} tokens would show a bias of {found:.3f} per token, and {WANTED} is wanted; "
        f"use --samples {_round_up(need)}"
    )


def _round_up(count: float) -> int:
    """Two leading digits, with a tenth to spare."""
    count = max(1.0, 1.1 * count)
    unit = 10 ** max(0, len(str(int(count))) - 2)
    return int(-(-count // unit) * unit)
