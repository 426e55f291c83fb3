"""Staged drafting is lossless: a draft model that is itself sped up by a smaller one, by exact enumeration.

The staged draft (Spector & Ré 2023, arXiv 2308.04623) runs whole lossless rounds of the middle model against the
small one. What such rounds emit, the recovered and bonus tokens included, has the middle model's own law, so the
target's test takes the middle model's rows as q. Both stages run the production rule with branching coins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from test_rules_exact import EXACT, BranchingCoins, Model, V, continued, joint_law, round_law, total_variation
from torch import Tensor

from spectune.decoding import rules

Blocks = dict[tuple[int, ...], float]  # staged drafts with their probabilities


def after(model: Model, prefix: tuple[int, ...]) -> Callable[[tuple[int, ...]], Tensor]:
    """The model's laws behind a prefix."""
    return lambda rest: model(prefix + rest)


def one_round(middle: Model, small: Model, k: int, prefix: tuple[int, ...], **variant) -> Blocks:
    """What the inner stage emits in one round behind a prefix: 1 … k + 1 tokens."""
    emitted, _ = round_law(after(middle, prefix), after(small, prefix), k, rules.speculative, **variant)
    return emitted


def staged(middle: Model, small: Model, k: int, width: int, **variant) -> Blocks:
    """Inner rounds until `width` tokens are there; what the last one emits beyond that is cut off."""
    blocks: Blocks = {(): 1.0}
    while any(len(block) < width for block in blocks):
        longer: Blocks = {}
        for block, weight in blocks.items():
            more = one_round(middle, small, k, block, **variant) if len(block) < width else {(): 1.0}
            for tokens, chance in more.items():
                out = (block + tokens)[:width]
                longer[out] = longer.get(out, 0.0) + weight * chance
        blocks = longer
    return blocks


def outer_round(target: Model, blocks: Blocks, recorded: Model, width: int) -> dict[tuple[int, ...], float]:
    """What the target's round emits, over all staged drafts in one ragged batch."""
    coin = list(itertools.product(itertools.product([False, True], repeat=width), range(V)))
    n, m = len(blocks), len(coin)
    padded = [block + (0,) * (width - len(block)) for block in blocks]

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(m, 0)

    tokens = repeated(torch.tensor(padded))
    coins = BranchingCoins(
        torch.tensor([c for c, _ in coin], dtype=torch.bool).repeat(n, 1), torch.tensor([t for _, t in coin]).repeat(n)
    )
    verdict = rules.speculative(
        tokens,
        repeated(torch.tensor([len(block) for block in blocks])),
        repeated(torch.stack([torch.stack([target(block[:i]) for i in range(width + 1)]) for block in padded])),
        repeated(torch.stack([torch.stack([recorded(block[:i]) for i in range(width)]) for block in padded])),
        coins,
    )
    chances = [chance for chance in blocks.values() for _ in range(m)]
    emitted: dict[tuple[int, ...], float] = {}
    columns = (tokens, verdict.accepted, verdict.token, coins.weight)
    for block, accepted, token, weight, chance in zip(*(x.tolist() for x in columns), chances, strict=True):
        out = (*block[:accepted], token)
        emitted[out] = emitted.get(out, 0.0) + weight * chance
    return emitted


def error(target: Model, blocks: Blocks, recorded: Model, width: int) -> float:
    law = continued(outer_round(target, blocks, recorded, width), target, width + 1)
    return total_variation(joint_law(target, width + 1), law)


def models(seed: int) -> tuple[Model, Model, Model]:
    return Model(seed), Model(400 + seed), Model(500 + seed)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_staged_draft_of_fixed_width_is_lossless(k, seed):
    target, middle, small = models(seed)
    blocks = staged(middle, small, k, width=2)
    assert sum(blocks.values()) == pytest.approx(1.0, abs=1e-12)
    assert error(target, blocks, middle, 2) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_a_staged_draft_as_long_as_its_inner_round_is_lossless(seed):
    """Drafts of 1 … 3 tokens: how long they are depends on the inner stage's tests, and yet nothing is skewed."""
    target, middle, small = models(seed)
    blocks = one_round(middle, small, 2, ())
    assert {len(block) for block in blocks} == {1, 2, 3}
    assert error(target, blocks, middle, 3) < EXACT


def one_hot(q: Tensor) -> Tensor:
    return rules.one_hot(q.argmax(-1), V, q.dtype)


def test_a_deterministic_first_stage_is_lossless():
    """An n-gram table in front of a draft model."""
    target, middle, small = models(5)
    blocks = staged(middle, small, 2, width=2, sampled_from=one_hot, recorded=one_hot)
    assert error(target, blocks, middle, 2) < EXACT


# Known-bad variants: the same proof must reject each of them.


def worst(make_error: Callable[[Model, Model, Model], float], seeds: int = 10) -> float:
    return max(make_error(*models(seed)) for seed in range(seeds))


def test_control_testing_against_the_small_models_rows_is_found():
    assert worst(lambda target, middle, small: error(target, staged(middle, small, 1, 2), small, 2)) > 0.1


def test_control_dropping_the_inner_recovered_token_is_found():
    def error_of_accepted_only(target: Model, middle: Model, small: Model) -> float:
        blocks: Blocks = {}
        for block, weight in one_round(middle, small, 2, ()).items():
            blocks[block[:-1]] = blocks.get(block[:-1], 0.0) + weight
        return error(target, blocks, middle, 2)

    assert worst(error_of_accepted_only) > 0.05
