"""The acceptance rules are lossless: proven by exact enumeration of every outcome, in float64.

The production rules run with coins that do not toss but branch: one row per combination of decisions, weighted by
its probability. The joint law of the next K + 1 tokens must equal the target's own to 1e-12. Biased variants
of the rule go through the same enumeration and must fail, which shows that the proof has power.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectune.decoding import rules
from spectune.decoding.sampling import probabilities
from spectune.sweeping.cell import Sampling

V = 3
EXACT = 1e-12


class BranchingCoins:
    """Plays given decisions and multiplies each row's weight by their probability."""

    def __init__(self, decisions: Tensor, closing: Tensor) -> None:
        self.decisions = decisions  # [B, K] bool
        self.closing = closing  # [B]
        self.weight = torch.ones(decisions.shape[0], dtype=torch.float64)

    def below(self, thresholds: Tensor) -> Tensor:
        thresholds = thresholds.clamp(0, 1)
        self.weight = self.weight * torch.where(self.decisions, thresholds, 1 - thresholds).prod(1)
        return self.decisions

    def draw(self, weights: Tensor) -> Tensor:
        law = weights / weights.sum(-1, keepdim=True)
        self.weight = self.weight * law.gather(1, self.closing[:, None]).squeeze(1)
        return self.closing


class Model:
    """A random language model over V tokens: one distribution per prefix."""

    def __init__(self, seed: int, sharpness: float = 1.5, zeros: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sharpness = sharpness
        self.zeros = zeros
        self.laws: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self.laws:
            logits = torch.randn(V, generator=self.generator, dtype=torch.float64) * self.sharpness
            law = logits.softmax(-1)
            if self.zeros:
                law = torch.where(law == law.min(), 0.0, law)
                law = law / law.sum()
            self.laws[prefix] = law
        return self.laws[prefix]


def joint_law(model: Model, length: int) -> dict[tuple[int, ...], float]:
    law = {}
    for tokens in itertools.product(range(V), repeat=length):
        p = 1.0
        for i, token in enumerate(tokens):
            p *= model(tokens[:i])[token].item()
        law[tokens] = p
    return law


def round_law(
    target: Model,
    draft: Model,
    k: int,
    rule: Callable[..., rules.Verdict],
    *,
    sampled_from: Callable[[Tensor], Tensor] = lambda q: q,
    recorded: Callable[[Tensor], Tensor] = lambda q: q,
    count: int | None = None,
) -> tuple[dict[tuple[int, ...], float], float]:
    """Law of what one round emits, and the expected number of emitted tokens.

    `sampled_from` turns the draft's distribution into what tokens are drawn from, `recorded` into what the rule is
    told; they are equal in a correct decoder. `count` shortens the real draft below k.
    """
    real = k if count is None else count
    emitted: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for drafted in itertools.product(range(V), repeat=real):
        p_draft = 1.0
        for i, token in enumerate(drafted):
            p_draft *= sampled_from(draft(drafted[:i]))[token].item()
        if p_draft == 0:
            continue
        padded = drafted + (0,) * (k - real)
        p = torch.stack([target(padded[:i]) for i in range(k + 1)])
        q = torch.stack([recorded(draft(padded[:i])) for i in range(k)]) if k else p[:0]
        combos = list(itertools.product(itertools.product([False, True], repeat=k), range(V)))
        coins = BranchingCoins(
            torch.tensor([c for c, _ in combos], dtype=torch.bool).reshape(len(combos), k),
            torch.tensor([t for _, t in combos]),
        )
        verdict = rule(
            torch.tensor([padded] * len(combos), dtype=torch.long).reshape(len(combos), k),
            torch.full((len(combos),), real),
            p.expand(len(combos), -1, -1),
            q.expand(len(combos), -1, -1),
            coins,
        )
        for accepted, token, weight in zip(*verdict, coins.weight, strict=True):
            if weight > 0:
                out = (*drafted[: int(accepted)], int(token))
                emitted[out] = emitted.get(out, 0.0) + p_draft * weight.item()
                mean += p_draft * weight.item() * len(out)
    return emitted, mean


def continued(emitted: dict[tuple[int, ...], float], target: Model, length: int) -> dict[tuple[int, ...], float]:
    """Extend each outcome with the target's own law to a fixed length, so that outcomes of different length compare."""
    law = dict.fromkeys(itertools.product(range(V), repeat=length), 0.0)
    for start, weight in emitted.items():
        for rest in itertools.product(range(V), repeat=length - len(start)):
            p = weight
            for i in range(len(rest)):
                p *= target(start + rest[:i])[rest[i]].item()
            law[start + rest] += p
    return law


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a[x] - b[x]) for x in a) / 2


def error(target: Model, draft: Model, k: int, rule, **variant) -> float:
    emitted, _ = round_law(target, draft, k, rule, **variant)
    return total_variation(joint_law(target, k + 1), continued(emitted, target, k + 1))


RULES = {"speculative": rules.speculative, "block": rules.block}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_emitted_tokens_have_exactly_the_targets_law(rule, k, seed):
    target, draft = Model(seed), Model(100 + seed)
    assert error(target, draft, k, RULES[rule]) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_shortened_draft_is_lossless_too(rule, count):
    assert error(Model(3), Model(103), 3, RULES[rule], count=count) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_zeros_in_p_and_q_are_handled(rule, seed):
    target, draft = Model(seed, zeros=True), Model(50 + seed, zeros=True)
    assert error(target, draft, 2, RULES[rule]) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_equal_to_the_target_is_always_accepted(rule):
    target = Model(8)
    _, mean = round_law(target, target, 3, RULES[rule])
    assert mean == pytest.approx(4.0, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_truncated_draft_is_lossless_when_the_truncated_q_is_recorded(rule):
    def truncated(q: Tensor) -> Tensor:
        return probabilities(q.log(), Sampling(temperature=0.7, top_k=2))

    assert error(Model(5), Model(105), 2, RULES[rule], sampled_from=truncated, recorded=truncated) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_draft_is_lossless_as_a_one_hot_q(rule):
    def one_hot(q: Tensor) -> Tensor:
        return rules.one_hot(q.argmax(-1), V, q.dtype)

    assert error(Model(6), Model(106), 2, RULES[rule], sampled_from=one_hot, recorded=one_hot) < EXACT


def test_block_verification_never_emits_fewer_tokens_than_speculative_sampling():
    gains = []
    for seed in range(30):
        target, draft = Model(seed), Model(200 + seed)
        _, block = round_law(target, draft, 2, rules.block)
        _, chain = round_law(target, draft, 2, rules.speculative)
        assert block >= chain - 1e-12
        gains.append(block - chain)
    assert max(gains) > 0.01


def test_sample_then_match_is_lossless():
    """Choices drawn from p at every place, whatever was drafted: the emitted prefix is the target's own draw."""
    target, draft = Model(4), Model(104)
    k = 2
    emitted: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(V), repeat=k):
        p_draft = draft(())[drafted[0]].item() * draft(drafted[:1])[drafted[1]].item()
        for choices in itertools.product(range(V), repeat=k + 1):
            weight = p_draft
            for i, y in enumerate(choices):
                weight *= target(drafted[:i])[y].item()
            verdict = rules.match(torch.tensor([drafted]), torch.tensor([k]), torch.tensor([choices], dtype=torch.long))
            out = (*drafted[: int(verdict.accepted)], int(verdict.token))
            emitted[out] = emitted.get(out, 0.0) + weight
    assert total_variation(joint_law(target, k + 1), continued(emitted, target, k + 1)) < EXACT


# Known-bad variants: the same proof must reject each of them.


def worst(make_error: Callable[[Model, Model], float], seeds: int = 12) -> float:
    return max(make_error(Model(seed), Model(300 + seed)) for seed in range(seeds))


def test_control_recording_q_before_temperature_is_found():
    def cooled(q: Tensor) -> Tensor:
        return probabilities(q.log(), Sampling(temperature=0.5))

    assert worst(lambda t, d: error(t, d, 2, rules.speculative, sampled_from=cooled)) > 0.02


def test_control_recording_the_untruncated_q_is_found():
    def truncated(q: Tensor) -> Tensor:
        return probabilities(q.log(), Sampling(temperature=1.0, top_k=2))

    assert worst(lambda t, d: error(t, d, 2, rules.speculative, sampled_from=truncated)) > 0.02


def test_control_a_greedy_draft_recorded_as_softmax_is_found():
    def greedy(q: Tensor) -> Tensor:
        return rules.one_hot(q.argmax(-1), V, q.dtype)

    for rule in RULES.values():
        assert worst(lambda t, d, rule=rule: error(t, d, 2, rule, sampled_from=greedy)) > 0.1


def test_control_resampling_from_p_after_a_rejection_is_found():
    def resample_from_p(tokens, counts, p, q, coins):
        class Recorder:
            below = staticmethod(coins.below)

            @staticmethod
            def draw(weights):
                return torch.zeros(weights.shape[0], dtype=torch.long)

        accepted = rules.speculative(tokens, counts, p, q, Recorder).accepted
        return rules.Verdict(accepted, coins.draw(p[torch.arange(p.shape[0]), accepted]))

    assert worst(lambda t, d: error(t, d, 2, resample_from_p)) > 0.02


def test_control_discarding_an_unlikely_drafted_token_is_found():
    def cut_unlikely(tokens, counts, p, q, coins):
        likely = q.gather(-1, tokens[..., None]).squeeze(-1) >= 0.3
        counts = torch.minimum(counts, likely.long().cumprod(1).sum(1))
        return rules.speculative(tokens, counts, p, q, coins)

    assert worst(lambda t, d: error(t, d, 2, cut_unlikely)) > 0.02


def test_control_typical_acceptance_is_found():
    def typical(tokens, counts, p, q, coins):
        """Accept whatever is not too unlikely under p: the lossy rule of Medusa."""
        keep = p[:, :-1].gather(-1, tokens[..., None]).squeeze(-1) > 0.2
        accepted = keep.long().cumprod(1).sum(1)
        coins.below(keep.double())
        return rules.Verdict(accepted, coins.draw(p[torch.arange(p.shape[0]), accepted]))

    assert worst(lambda t, d: error(t, d, 2, typical)) > 0.1
