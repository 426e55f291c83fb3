"""Advice about a run: why speculation gains little or nothing there, or why the answer is less sure than it looks.

Every piece follows from numbers of the run. Where a break-even is named it is this machine's: from the times of a
draft step, of the verification and of a plain step in the very cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from spectune.recommending.doubts import doubts
from spectune.recommending.finding import Finding
from spectune.recommending.schedule import Schedule
from spectune.speedup.profile import Profile
from spectune.speedup.run import Run
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees

RULE_OF_THUMB = 0.6  # the acceptance rate often named as the least that pays
SHORT = 32  # output tokens
_HEADS = {"medusa", "blockwise", "eagle", "eagle2", "eagle3", "mlp"}


def advise(run: Run, profiles: Sequence[Profile], found: Sequence[Schedule]) -> tuple[Finding, ...]:
    """All findings, doubts about the machine and the measurement first: with them the others are less sure.

    A drafter is judged by its best K at each suite and batch.
    """
    usable = [p for p in profiles if p.excluded is None]
    best = _best(usable)
    return (
        *doubts(run, usable),
        *(finding for p in best for finding in _draft(p)),
        *_batch_too_large(found),
        *_k_too_high(usable),
        *_tokenizers(run),
        *_short_outputs(usable),
    )


def _best(profiles: Sequence[Profile]) -> list[Profile]:
    groups: dict[tuple[str, str, str, int], list[Profile]] = {}
    for p in profiles:
        if p.spec.k > 0 and p.speedup.value is not None:
            groups.setdefault((p.spec.drafter, p.spec.rule, p.spec.suite, p.spec.batch), []).append(p)
    return [max(own, key=lambda p: p.speedup.value or 0.0) for own in groups.values()]


def _draft(p: Profile) -> Iterator[Finding]:
    """Where the drafter's best K is SLOWER: what about the draft would have to change for it to pay.

    Too weak: at full acceptance the round would pay. Too big: a draft that costs nothing would pay with the same
    acceptance. Both may hold; where neither does, verification and overhead alone cost too much.
    """
    rate, length, drafted = p.acceptance.acceptance_rate, p.acceptance.acceptance_length, p.acceptance.drafted_per_round
    timed = p.timing
    even, plain, step = timed.break_even_length, timed.plain_round_seconds, timed.target_step_seconds
    if p.speedup.verdict != "SLOWER" or rate is None or length is None or not drafted or even is None:
        return
    if not plain or not step or timed.draft_seconds is None or timed.round_seconds is None:
        return
    where, cost = _where(p), timed.cost_ratio or 0.0
    needed = (even - 1) / drafted
    if rate < needed <= 1:
        thumb = "would call this enough" if rate >= RULE_OF_THUMB else "says the same"
        text = (
            f"{rate:.0%} of the drafted tokens are kept at {drafted:.1f} a round, and with T_d/T_t {cost:.2f} it takes "
            f"{needed:.0%} to break even here (the rule of thumb, {RULE_OF_THUMB:.0%}, {thumb}): use a draft that "
            "agrees more, or a smaller K"
        )
        yield Finding("draft-too-weak", where, "acceptance rate", rate, needed, text)
    free = (timed.round_seconds - timed.draft_seconds) / plain
    steps = timed.draft_steps or 0.0
    if steps > 0 and free < length < even:
        most = (length - free) * plain / steps / step
        text = (
            f"a draft step costs {cost:.2f} of a target step, and with this acceptance it may cost {most:.2f} at most: "
            "use a smaller draft, or fewer steps"
        )
        yield Finding("draft-too-big", where, "T_d/T_t", cost, most, text)
    if needed > 1 and free >= length:
        text = (
            f"verification and overhead alone cost {free:.2f} plain rounds for {length:.2f} tokens: no draft pays "
            "here; decode plainly"
        )
        yield Finding("verification-too-dear", where, "plain rounds", free, length, text)


def _batch_too_large(found: Sequence[Schedule]) -> Iterator[Finding]:
    for schedule in found:
        crossover = schedule.crossover
        slower = [row for row in schedule.rows if row.speedup.verdict == "SLOWER"]
        paying = [row.batch for row in schedule.rows if row.k > 0]
        if crossover is None or crossover.value is None or not paying:
            continue
        over = next((row for row in slower if row.batch > crossover.value), None)
        if over is not None and over.speedup.value is not None:
            text = (
                f"{crossover.text('batch')}: at batch {over.batch} the best K decodes {over.speedup.value:.2f} times "
                f"as fast as plain decoding; leave it off from there, it pays up to batch {max(paying)}"
            )
            yield Finding("batch-too-large", schedule.drafter, "batch", over.batch, crossover.value, text)


def _k_too_high(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Where the largest measured K is clearly slower than the best: the two intervals do not touch."""
    groups: dict[tuple[str, str, str, int], list[Profile]] = {}
    for p in profiles:
        if p.spec.k > 0 and p.speedup.low is not None:
            groups.setdefault((p.spec.drafter, p.spec.rule, p.spec.suite, p.spec.batch), []).append(p)
    for own in groups.values():
        largest, best = max(own, key=lambda p: p.spec.k), max(own, key=lambda p: p.speedup.value or 0.0)
        high, low = largest.speedup.high, best.speedup.low
        if high is None or low is None or high >= low or best.speedup.value is None or largest.speedup.value is None:
            continue
        last = largest.acceptance.joint_acceptance[-1] if largest.acceptance.joint_acceptance else None
        kept = "" if last is None else f"; its last position is kept in {last:.0%} of rounds{_worth(largest)}"
        text = (
            f"K {largest.spec.k} decodes {largest.speedup.value:.2f} times as fast as plain decoding, "
            f"K {best.spec.k} {best.speedup.value:.2f} times{kept}: use K {best.spec.k}"
        )
        yield Finding("k-too-high", _where(largest), "K", largest.spec.k, best.spec.k, text)


def _worth(p: Profile) -> str:
    """The share of rounds in which one more position must be kept to pay for its draft step alone."""
    length, step, whole = p.acceptance.acceptance_length, p.timing.draft_step_seconds, p.timing.round_seconds
    chain = not drafts_trees(p.spec.drafter) and not drafts_at_once(p.spec.drafter)
    if not chain or length is None or not step or not whole:
        return ""
    return f" where its draft step alone takes {length * step / whole:.0%} to pay"


def _tokenizers(run: Run) -> Iterator[Finding]:
    """Vocabularies of other sizes. Padding makes them differ too, so this alone does not say that tokenizers do."""
    target = run.info.target.vocab_size
    for name, model in run.info.drafters.items():
        is_head = bool(set(re.split("[:>]", name)) & _HEADS)  # trained on the target: a smaller vocabulary is a choice
        if model is not None and not is_head and model.vocab_size and target and model.vocab_size != target:
            text = (
                f"its vocabulary has {model.vocab_size} entries, the target's {target}: with one tokenizer that is "
                "padding; with two, tokens mean different texts and next to nothing is accepted"
            )
            yield Finding("tokenizers-differ", name, "vocabulary entries", model.vocab_size, target, text)


def _short_outputs(profiles: Sequence[Profile]) -> Iterator[Finding]:
    suites: dict[str, list[int]] = {}
    for p in profiles:
        suites.setdefault(p.spec.suite, []).extend(r.output_tokens for done in p.cell.passes for r in done.requests)
    for suite, lengths in suites.items():
        typical = float(median(lengths))
        if typical < SHORT:
            text = (
                f"half of the outputs have at most {typical:g} tokens: the prefill of target and draft weighs more "
                "than decoding, so look at the end-to-end rate; speculation is for longer outputs"
            )
            yield Finding("outputs-too-short", suite, "output tokens", typical, SHORT, text)


def _where(p: Profile) -> str:
    return f"{p.spec.drafter}, K {p.spec.k}, {p.spec.suite}, batch {p.spec.batch}"
