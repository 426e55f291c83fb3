"""One meaning for every figure: bonus token or not, joint or conditional, share or percent. Pure.

A *length* counts tokens per round. With the target's own token (the bonus or the correction) it lies between 1 and
K + 1, without it between 0 and K; only the file, or its user, knows which. Where a file has counts, its stated
figures must follow from them, else something is not what it is taken for, and that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NoReturn

from spectune.errors import UsageError

Bonus = Literal["included", "excluded"]
Rates = Literal["joint", "conditional"]
_BOTH: tuple[Bonus, ...] = ("included", "excluded")
_ROUNDED = 0.02  # figures in files have two decimals or more


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user says about files that do not say it themselves."""

    bonus: Bonus | None = None
    rates: Rates | None = None
    k: int | None = None
    batch: int | None = None
    drafter: str | None = None
    suite: str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """Acceptance as a file states it. `keys` names where each figure stands, for errors.

    `bonus` is what the format documents about `length`; None where it documents nothing. Rates are shares.
    """

    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    kept: Mapping[int, int] | None = None  # accepted tokens -> rounds
    length: float | None = None
    bonus: Bonus | None = None
    rate: float | None = None
    joint: Sequence[float] | None = None
    conditional: Sequence[float] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def acceptance_fields(given: Given, file: str, k: int | None, answers: Answers) -> dict[str, Any]:
    """The acceptance part of a Point.

    Raises:
        UsageError: figures that contradict each other, or a length whose definition nobody stated.
    """
    missing: dict[str, str] = {}
    rounds, accepted = _counts(given, file)
    if accepted is not None and given.drafted is not None and accepted > given.drafted:
        _refuse(file, given, "accepted", f"{accepted} accepted of {given.drafted} drafted tokens")
    joint = _joint(given, file, rounds, k)
    length = _length(given, file, rounds, accepted, joint, answers)
    rate = accepted / given.drafted if accepted is not None and given.drafted else given.rate
    if rate is None:
        missing["acceptance_rate"] = "nothing was drafted" if given.drafted == 0 else "no count of drafted tokens"
    elif not 0 <= rate <= 1:
        _refuse(file, given, "rate", f"a share lies between 0 and 1, not {rate:g}")
    elif given.rate is not None and abs(rate - given.rate) > _ROUNDED:
        _refuse(file, given, "rate", f"{given.rate:g} is stated where the counts give {rate:g}")
    conditional, reason = _conditional(given, joint, rounds)
    if reason:
        missing["conditional"] = reason
    if not joint:
        shortened = given.conditional is not None
        missing["joint"] = "drafts were shortened: it does not follow" if shortened else "no rates by position"
    if length is None:
        missing["acceptance_length"] = "no counts of rounds and accepted tokens"
    counted = {"rounds": rounds, "drafted": given.drafted, "accepted": accepted}
    missing.update({name: "not in the file" for name, value in counted.items() if value is None})
    return {
        **counted,
        "kept": tuple(sorted((given.kept or {}).items())),
        "acceptance_length": length,
        "acceptance_rate": rate,
        "joint": joint,
        "conditional": conditional,
        "missing": missing,
    }


def with_bonus(length: float, bonus: Bonus) -> float:
    """The length with the target's own token counted."""
    return length if bonus == "included" else length + 1


def joint_of(conditional: Sequence[float]) -> tuple[float, ...]:
    """P(the first i are all accepted) from P(i is accepted | those before it are)."""
    found, product = [], 1.0
    for rate in conditional:
        product *= rate
        found.append(product)
    return tuple(found)


def conditional_of(joint: Sequence[float]) -> tuple[float | None, ...]:
    """The reverse, for drafts that are never shortened; None behind a position that was never reached."""
    before = 1.0
    found: list[float | None] = []
    for rate in joint:
        found.append(min(1.0, rate / before) if before > 0 else None)
        before = rate
    return tuple(found)


def joint_of_kept(kept: Mapping[int, int], k: int) -> tuple[float, ...]:
    """The share of rounds that accepted i tokens or more, i = 1 … k."""
    rounds = sum(kept.values())
    return tuple(sum(n for a, n in kept.items() if a >= i) / rounds for i in range(1, k + 1)) if rounds else ()


def _counts(given: Given, file: str) -> tuple[int | None, int | None]:
    if given.kept is None:
        return given.rounds, given.accepted
    rounds, accepted = sum(given.kept.values()), sum(a * n for a, n in given.kept.items())
    for name, stated, counted in (("rounds", given.rounds, rounds), ("accepted", given.accepted, accepted)):
        if stated is not None and stated != counted:
            _refuse(file, given, name, f"{stated} {name} are stated where the histogram has {counted}")
    return rounds, accepted


def _joint(given: Given, file: str, rounds: int | None, k: int | None) -> tuple[float, ...]:
    if given.kept and rounds:
        most = max(given.kept)
        if k is not None and most > k:
            _refuse(file, given, "kept", f"{most} tokens were accepted in a round where K is {k}")
        return joint_of_kept(given.kept, most if k is None else k)
    name = "joint" if given.joint is not None else "conditional"
    rates = given.joint if given.joint is not None else given.conditional
    if rates is None:
        return ()
    if any(not 0 <= rate <= 1 for rate in rates):
        _refuse(file, given, name, "rates lie between 0 and 1")
    if name == "conditional" and _shortened(given, len(rates)):
        return ()
    joint = tuple(rates) if name == "joint" else joint_of(rates)
    if any(later > before + _ROUNDED for before, later in pairwise(joint)):
        _refuse(file, given, name, "joint rates never rise from one position to the next")
    return joint


def _length(
    given: Given,
    file: str,
    rounds: int | None,
    accepted: int | None,
    joint: Sequence[float],
    answers: Answers,
) -> float | None:
    """With the bonus. Counts decide; then rates by position; then what is stated, if its definition is."""
    if rounds == 0:
        return None
    known = 1 + accepted / rounds if rounds and accepted is not None else 1 + sum(joint) if joint else None
    if joint and known is not None and abs(1 + sum(joint) - known) > _ROUNDED * known:
        name = "joint" if given.joint is not None else "conditional"
        _refuse(
            file, given, name, f"the rates by position add up to {1 + sum(joint):.3g} and the counts to {known:.3g}"
        )
    if given.length is None:
        return known
    bonus = given.bonus or answers.bonus
    if known is not None:
        fits = [b for b in _BOTH if abs(with_bonus(given.length, b) - known) <= _ROUNDED * known]
        if not fits or (bonus is not None and bonus not in fits):
            said = f" with the bonus token {bonus}" if bonus else ""
            _refuse(file, given, "length", f"{given.length:g}{said} is stated where the counts give {known:.4g}")
        return known
    if bonus is None:
        key = given.keys.get("length", "the acceptance length")
        raise UsageError(
            f"{file}: {key} does not say whether the target's own (bonus) token is counted",
            "add --bonus included or --bonus excluded",
        )
    length = with_bonus(given.length, bonus)
    if length < 1:
        _refuse(file, given, "length", f"{given.length:g} with the bonus token {bonus} is below 1 token a round")
    return length


def _conditional(
    given: Given, joint: Sequence[float], rounds: int | None
) -> tuple[tuple[float | None, ...], str | None]:
    """They follow from joint rates only where every round drafted to the end."""
    if given.conditional is not None:
        return tuple(given.conditional), None
    if not joint:
        return (), "no rates by position"
    if rounds is None or given.drafted is None:
        return (), "the file does not say whether every round drafted K tokens"
    if given.drafted != rounds * len(joint):
        return (), f"drafts were shortened: {given.drafted / max(rounds, 1):.2f} tokens a round, not {len(joint)}"
    return conditional_of(joint), None


def _shortened(given: Given, k: int) -> bool:
    return given.drafted is not None and given.rounds is not None and given.drafted != given.rounds * k


def _refuse(file: str, given: Given, name: str, why: str) -> NoReturn:
    raise UsageError(f"{file}: {given.keys.get(name, name)}: {why}", "check the definitions behind the file")
