"""Why an answer is what it is: short sentences made of measured numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectune.speedup.profile import Config, Profile
from spectune.speedup.uncertainty import Estimate


def on(config: Config, speedup: Estimate, members: Sequence[Profile]) -> tuple[str, ...]:
    """Why a configuration is recommended."""
    return (
        f"{config} decodes {_speedup(speedup)} times as fast as plain decoding.",
        *_numbers(members),
    )


def off(best: Config, speedup: Estimate, members: Sequence[Profile], options: int) -> tuple[str, ...]:
    """Why none is: the numbers of the option that came closest."""
    first = "The only configuration" if options == 1 else f"The best of {options} configurations"
    if speedup.verdict == "SLOWER":
        end = ", which is slower than plain decoding"
    elif speedup.low is None:
        end = f", and how sure that is cannot be told: {speedup.reason}"
    elif speedup.reason is not None:
        end = f", which cannot be: {speedup.reason}"
    else:
        end = ", which may as well be no gain"
    return (f"{first}, {best}, measured {_speedup(speedup)} times plain decoding{end}.", *_numbers(members))


def unsure(others: int) -> tuple[str, ...]:
    """Options that measured worse than the best one, which is slower, but too roughly to say so of them."""
    if not others:
        return ()
    ways = "configuration" if others == 1 else "configurations"
    return (f"{others} other {ways} measured lower still, too roughly for a verdict.",)


def flat(chosen: Config, within: Sequence[Config]) -> tuple[str, ...]:
    """What else is as good, and how the tie was broken."""
    others = [str(c) for c in within if c != chosen]
    if not others:
        return ()
    return (f"Within 1 % of the best: {'; '.join(others)}. The best drafter's smallest K is taken.",)


def uncertain_rival(best: Config, speedup: Estimate) -> tuple[str, ...]:
    """A configuration that measured fastest, but may be no gain at all, is not recommended."""
    if speedup.verdict == "FASTER":
        return ()
    but = "may as well be no gain" if speedup.reason is None else f"cannot be told: {speedup.reason}"
    return (f"{best} measured {_speedup(speedup)}, but that {but}.",)


def not_faster_at(batch: int, speedup: Estimate) -> str:
    """A warning inside a recommendation that covers several batches."""
    if speedup.verdict == "SLOWER":
        return f"At batch {batch} it is slower than plain decoding, {_speedup(speedup)}: leave it off there."
    return f"At batch {batch} its speedup is {_speedup(speedup)}, which may be no gain."


def limits(*, unmeasured: Sequence[tuple[str, int]], partial: int, only_batch_1: bool) -> tuple[str, ...]:
    """What the answer does not rest on."""
    found = []
    if unmeasured:
        names = ", ".join(f"{suite} at batch {batch}" for suite, batch in unmeasured)
        found.append(f"Not covered, since no cell there has a usable speed: {names}.")
    if partial:
        ways = "configuration was" if partial == 1 else "configurations were"
        found.append(f"{partial} {ways} left out: not measured at every place; --plan full --resume would.")
    if only_batch_1:
        found.append("Only batch 1 was measured: larger batches gain less, and may lose.")
    return tuple(found)


def _numbers(members: Sequence[Profile]) -> list[str]:
    """What the speed is made of, over all cells of the configuration."""

    def span(value: Callable[[Profile], float | None], form: str = ".2f") -> str | None:
        known = [v for p in members if (v := value(p)) is not None]
        if not known:
            return None
        low, high = format(min(known), form), format(max(known), form)
        return low if low == high else f"{low} to {high}"

    sentences = []
    length = span(lambda p: p.acceptance.acceptance_length)
    drafted = span(lambda p: p.acceptance.drafted_per_round)
    if length and drafted:
        forced = any(p.spec.synthetic is not None for p in members)
        name = "Synthetic acceptance length" if forced else "Acceptance length"
        sentences.append(f"{name} {length} (bonus included) at {drafted} drafted tokens per round.")
    cost = span(lambda p: p.timing.cost_ratio)
    if cost:
        sentences.append(f"A draft step costs {cost} of a target step (T_d/T_t).")
    verify = span(lambda p: p.timing.verify_inflation)
    if verify:
        sentences.append(f"Verifying a draft costs {verify} plain steps.")
    overhead = span(lambda p: p.timing.overhead_share, ".0%")
    if overhead:
        sentences.append(f"Overhead takes {overhead} of a round.")
    even = span(lambda p: p.timing.break_even_length)
    if even:
        sentences.append(f"A round costs {even} plain rounds: it pays above that acceptance length.")
    return sentences


def _speedup(speedup: Estimate) -> str:
    if speedup.value is None:
        return "an unknown number of"
    if speedup.low is None or speedup.high is None:
        return f"{speedup.value:.2f}"
    return f"{speedup.value:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"
