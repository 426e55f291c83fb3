"""The staged drafter itself is lossless: its own code runs through every outcome of its coins, in float64.

Three levels of toy models; wherever a coin would be tossed, the run branches. What every branch drafts then goes
through the target's rule, whose coins branch too. The law of the emitted tokens must be the target's to 1e-12; known
mistakes go through the same proof and must be found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from test_rules_exact import EXACT, RULES, BranchingCoins, Model, V, continued, joint_law, total_variation
from torch import Tensor

from spectune.decoding import rules
from spectune.decoding.drafter import Draft, Round, Row
from spectune.decoding.sampling import History
from spectune.decoding.staged import StagedDrafter
from spectune.sweeping.cell import Sampling

CPU = torch.device("cpu")
PROMPT = [0, 1]  # known at the start; the toy models take no notice of it
STOP = 2


class Branches:
    """Walks through all branches of a computation, one run each."""

    def __init__(self) -> None:
        self.script: list[int] = []  # which option to take at each choice; beyond it, the first

    def runs(self, compute: Callable[[], object]) -> Iterator[tuple[object, float]]:
        """Results with their probabilities."""
        while True:
            self.taken: list[tuple[int, int]] = []
            self.weight = 1.0
            yield compute(), self.weight
            while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
                self.taken.pop()
            if not self.taken:
                return
            self.script = [option for option, _ in self.taken]
            self.script[-1] += 1

    def choose(self, weights: Sequence[float]) -> int:
        options = [i for i, weight in enumerate(weights) if weight > 0]
        depth = len(self.taken)
        option = self.script[depth] if depth < len(self.script) else 0
        self.taken.append((option, len(options)))
        self.weight *= weights[options[option]] / sum(weights)
        return options[option]


class TreeCoins:
    """Coins of one row that branch. Behind the first rejection nothing is decided, since nobody asks."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def below(self, thresholds: Tensor) -> Tensor:
        kept = []
        for threshold in thresholds[0].tolist():
            kept.append(all(kept) and self.branches.choose([threshold, 1 - threshold]) == 0)
        return torch.tensor([kept], dtype=torch.bool).reshape(thresholds.shape)

    def draw(self, weights: Tensor) -> Tensor:
        return torch.tensor([self.branches.choose(weights[0].tolist())])


class ToyFirst:
    """Draws its guess token by token, or, `lookup`, names the likeliest tokens without a distribution."""

    taps = ()
    device = None

    def __init__(self, model: Model, branches: Branches, *, lookup: bool = False) -> None:
        self.model, self.branches, self.lookup = model, branches, lookup

    def propose(self, round_: Round) -> Draft:
        text, laws = tuple(round_.rows[0].tokens[len(PROMPT) :]), []
        for _ in range(round_.width):
            laws.append(self.model(text))
            token = int(laws[-1].argmax()) if self.lookup else self.branches.choose(laws[-1].tolist())
            text += (token,)
        tokens = torch.tensor([text[len(text) - round_.width :]])
        return Draft(
            tokens, torch.tensor(round_.limits), None if self.lookup else torch.stack(laws)[None], round_.width
        )


class ToyStage:
    """A second stage on a toy model.

    With `cuts` its distribution depends on how the inner rounds have cut the text: behind the second and later tokens
    of an extension it is another one, as an EAGLE head's is.
    """

    taps = ()
    device = CPU
    target_vocab = V
    draft_ids = None

    def __init__(self, model: Model, *, cuts: bool = False) -> None:
        self.model, self.cuts = model, cuts

    def room(self, row: Row) -> int:
        return 100

    def begin(self, rows: Sequence[Row]) -> int:
        return 0

    def extend(self, rows: Sequence[Row], tokens: Tensor) -> tuple[Tensor, int]:
        text = tuple(rows[0].tokens[len(PROMPT) :])
        laws = []
        for i in range(tokens.shape[1] + 1):
            key = text + tuple(tokens[0, :i].tolist())
            laws.append(self.model((*key, "late") if self.cuts and i > 1 else key))
        return torch.stack(laws)[None].log(), 1

    def rewind(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        self.accepted = accepted[0]


class Branching(StagedDrafter):
    """The staged drafter with coins that branch."""

    def __init__(self, first, second, branches: Branches) -> None:
        super().__init__(first, second)
        self.branches = branches

    def _coins(self, inner: Round) -> TreeCoins:
        return TreeCoins(self.branches)


class Drafted(NamedTuple):
    tokens: tuple[int, ...]
    q: Tensor  # [K, V]
    weight: float


def round_of(k: int, *, stop: bool = False) -> Round:
    stop_ids = torch.tensor([STOP] if stop else [], dtype=torch.long)
    history = History(1, V, 1.0, CPU)
    return Round([Row(list(PROMPT), 5)], [k], k, k, "speculative", Sampling(temperature=1.0), history, stop_ids, CPU)


def drafts_of(make: Callable[[Branches], StagedDrafter], k: int, *, stop: bool = False) -> list[Drafted]:
    """Every draft that can come out, once per way in which it can."""
    branches = Branches()
    drafter = make(branches)
    found = []
    for draft, weight in branches.runs(lambda: drafter.propose(round_of(k, stop=stop))):
        found.append(Drafted(tuple(draft.tokens[0, : int(draft.counts)].tolist()), draft.probabilities[0], weight))
    assert sum(d.weight for d in found) == pytest.approx(1.0, abs=1e-12)
    return found


def outer_law(target: Model, drafts: Sequence[Drafted], k: int, rule=rules.speculative) -> dict[tuple, float]:
    """What the target's round emits, over all drafts and all decisions in one ragged batch."""
    decisions = list(itertools.product(itertools.product([False, True], repeat=k), range(V)))
    n, m = len(drafts), len(decisions)
    padded = [d.tokens + (0,) * (k - len(d.tokens)) for d in drafts]
    coins = BranchingCoins(
        torch.tensor([c for c, _ in decisions], dtype=torch.bool).repeat(n, 1),
        torch.tensor([t for _, t in decisions]).repeat(n),
    )
    p = torch.stack([torch.stack([target(tokens[:i]) for i in range(k + 1)]) for tokens in padded])
    tokens, counts, p, q = (
        x.repeat_interleave(m, 0)
        for x in (
            torch.tensor(padded),
            torch.tensor([len(d.tokens) for d in drafts]),
            p,
            torch.stack([d.q for d in drafts]),
        )
    )
    verdict = rule(tokens, counts, p, q, coins)
    chances = torch.tensor([d.weight for d in drafts], dtype=torch.float64).repeat_interleave(m) * coins.weight
    law: dict[tuple, float] = {}
    for drafted, accepted, token, chance in zip(
        tokens.tolist(), verdict.accepted.tolist(), verdict.token.tolist(), chances.tolist(), strict=True
    ):
        out = (*drafted[:accepted], token)
        law[out] = law.get(out, 0.0) + chance
    return law


def error(target: Model, drafts: Sequence[Drafted], k: int, rule=rules.speculative) -> float:
    return total_variation(joint_law(target, k + 1), continued(outer_law(target, drafts, k, rule), target, k + 1))


def models(seed: int, zeros: bool = False) -> tuple[Model, Model, Model]:
    return Model(seed, zeros=zeros), Model(400 + seed, zeros=zeros), Model(500 + seed, zeros=zeros)


def maker(first: Model, second: Model, *, lookup: bool = False, cuts: bool = False):
    return lambda branches: Branching(ToyFirst(first, branches, lookup=lookup), ToyStage(second, cuts=cuts), branches)


@pytest.fixture(params=[1, 2, 4])
def inner(request, monkeypatch) -> int:
    """How many tokens the first stage may guess."""
    monkeypatch.setattr("spectune.decoding.staged.INNER", request.param)
    return request.param


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_draft_has_exactly_the_second_stages_law_and_its_rows_are_recorded(inner, k, lookup):
    _, middle, small = models(1)
    found = drafts_of(maker(small, middle, lookup=lookup), k)
    law = dict.fromkeys(itertools.product(range(V), repeat=k), 0.0)
    for draft in found:
        law[draft.tokens] += draft.weight
        rows = torch.stack([middle(draft.tokens[:i]) for i in range(k)])
        torch.testing.assert_close(draft.q, rows, atol=1e-14, rtol=0)
    assert total_variation(law, joint_law(middle, k)) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_emitted_tokens_have_exactly_the_targets_law(inner, k, lookup, cuts, rule):
    for seed in range(2):
        target, middle, small = models(seed)
        found = drafts_of(maker(small, middle, lookup=lookup, cuts=cuts), k)
        assert error(target, found, k, RULES[rule]) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_zeros_in_every_distribution_are_handled(rule, seed):
    target, middle, small = models(seed, zeros=True)
    assert error(target, drafts_of(maker(small, middle), 2), 2, RULES[rule]) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_ends_at_a_stop_token_is_lossless(inner, rule):
    target, middle, small = models(7)
    found = drafts_of(maker(small, middle), 3, stop=True)
    assert {len(d.tokens) for d in found} == {1, 2, 3}
    assert all(STOP not in d.tokens[:-1] for d in found)
    assert error(target, found, 3, RULES[rule]) < EXACT


def test_four_levels_are_lossless():
    target, middle, small = models(3)

    def nested(branches: Branches) -> StagedDrafter:
        first = Branching(ToyFirst(Model(600), branches), ToyStage(small), branches)
        return Branching(first, ToyStage(middle), branches)

    assert error(target, drafts_of(nested, 3), 3) < EXACT


def test_the_second_stage_alone_is_lossless():
    target, middle, _ = models(4)
    assert error(target, drafts_of(lambda b: Branching(None, ToyStage(middle), b), 2), 2) < EXACT


# Known mistakes: the same proof must find each of them.


def worst(make_error: Callable[[Model, Model, Model], float], seeds: int = 8) -> float:
    return max(make_error(*models(seed)) for seed in range(seeds))


def test_control_testing_against_the_first_stages_rows_is_found():
    def error_of(target, middle, small):
        found = drafts_of(maker(small, middle), 2)
        wrong = [d._replace(q=torch.stack([small(d.tokens[:i]) for i in range(2)])) for d in found]
        return error(target, wrong, 2)

    assert worst(error_of) > 0.1


def test_control_dropping_the_token_that_ends_an_inner_round_is_found():
    class Dropping(Branching):
        """Drafts what its first inner round has accepted, and nothing else."""

        def propose(self, round_: Round) -> Draft:
            kept: list[int] = []
            self.second.rewind = lambda rows, accepted: kept.append(accepted[0])
            draft = super().propose(round_)
            return draft._replace(counts=torch.tensor([kept[0]]))

    def error_of(target, middle, small):
        make = lambda branches: Dropping(ToyFirst(small, branches), ToyStage(middle), branches)  # noqa: E731
        return error(target, drafts_of(make, 2), 2)

    assert worst(error_of) > 0.05


class Interval:
    """A coin known only as far as the tests that it went through tell."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 1.0

    def below(self, threshold: float, branches: Branches) -> bool:
        cut = min(max(threshold, self.low), self.high)
        is_below = branches.choose([cut - self.low, self.high - cut]) == 0
        self.low, self.high = (self.low, cut) if is_below else (cut, self.high)
        return is_below


class IntervalCoins(TreeCoins):
    """Coins that may have been tossed before: `coins` [K] by place."""

    def __init__(self, branches: Branches, coins: list[Interval]) -> None:
        super().__init__(branches)
        self.coins = coins

    def below(self, thresholds: Tensor) -> Tensor:
        kept = []
        for coin, threshold in zip(self.coins, thresholds[0].tolist(), strict=False):
            kept.append(all(kept) and coin.below(threshold, self.branches))
        return torch.tensor([kept], dtype=torch.bool).reshape(thresholds.shape)


def error_with_coins(target: Model, middle: Model, small: Model, k: int, *, reused: bool) -> float:
    """Draft and outer rule in one walk; `reused` lets the outer rule test with the first inner round's coins."""
    branches = Branches()
    tossed: list[list[Interval]] = []

    class Drafter(Branching):
        def _coins(self, inner: Round) -> IntervalCoins:
            tossed.append([Interval() for _ in range(k)])
            return IntervalCoins(branches, tossed[-1])

    drafter = Drafter(ToyFirst(small, branches), ToyStage(middle), branches)

    def emit() -> tuple[int, ...]:
        tossed.clear()
        draft = drafter.propose(round_of(k))
        drafted = tuple(draft.tokens[0].tolist())
        p = torch.stack([target(drafted[:i]) for i in range(k + 1)])[None]
        coins = IntervalCoins(branches, tossed[0] if reused else [Interval() for _ in range(k)])
        verdict = rules.speculative(draft.tokens, draft.counts, p, draft.probabilities, coins)
        return (*drafted[: int(verdict.accepted)], int(verdict.token))

    law: dict[tuple, float] = {}
    for out, weight in branches.runs(emit):
        law[out] = law.get(out, 0.0) + weight
    return total_variation(joint_law(target, k + 1), continued(law, target, k + 1))


def test_fresh_coins_for_the_outer_rule_are_lossless():
    assert error_with_coins(*models(2), 2, reused=False) < EXACT


def test_control_reusing_an_inner_coin_in_the_outer_rule_is_found():
    assert worst(lambda *three: error_with_coins(*three, 2, reused=True), seeds=4) > 0.02
