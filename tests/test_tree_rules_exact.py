"""The tree rules are lossless: proven by exact enumeration of every outcome, in float64.

As in test_rules_exact: the production rules run with coins that branch instead of toss, for every tree that the
drafter could have drawn. The joint law of the next tokens must equal the target's own to 1e-12; trees of different
size and shape go through one call, so that ragged batches are proven too. Biased variants must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from test_rules_exact import EXACT, Model, V, continued, joint_law, total_variation
from torch import Tensor

from spectune.decoding import rules, tree_rules
from spectune.decoding.random import CounterCoins
from spectune.decoding.tree import TokenTree

DEPTH = 2
SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (0, 1),
    (0, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 0, 2),
    (0, 0, 1, 1),
    (0, 0, 1, 2, 2),
]
Rule = Callable[[TokenTree, Tensor, Tensor, Tensor, Tensor, "BranchingCoins"], tree_rules.TreeVerdict]


class BranchingCoins:
    """Plays given decisions and multiplies each row's weight by their probability.

    A rule may test the nodes in several calls, each with thresholds of 0 for the nodes it does not test. A decision
    that no test asked for is counted once, as False.
    """

    def __init__(self, decisions: Tensor, real: Tensor, closing: Tensor) -> None:
        self.decisions = decisions  # [B, K] bool
        self.real = real  # [B, K] bool
        self.closing = closing  # [B]
        self.tested = torch.zeros_like(decisions)
        self.weight = torch.ones(decisions.shape[0], dtype=torch.float64)

    def below(self, thresholds: Tensor) -> Tensor:
        tested = (thresholds > 0) & self.real
        assert not (tested & self.tested).any(), "a coin may decide only once"
        self.tested |= tested
        thresholds = thresholds.clamp(max=1)
        chance = torch.where(self.decisions, thresholds, 1 - thresholds)
        self.weight = self.weight * torch.where(tested, chance, 1.0).prod(1)
        return self.decisions & tested

    def draw(self, weights: Tensor) -> Tensor:
        law = weights / weights.sum(-1, keepdim=True)
        self.weight = self.weight * law.gather(1, self.closing[:, None]).squeeze(1)
        self.weight = self.weight * ~(self.decisions & ~self.tested).any(1)
        return self.closing


def path_of(parents: tuple[int, ...], tokens: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    return () if node == 0 else (*path_of(parents, tokens, parents[node - 1]), tokens[node - 1])


def next_child_law(q: Tensor, elders: list[int], siblings: str) -> Tensor:
    """Law of a node's next child, given the tokens of its elder siblings."""
    if siblings == "iid":
        return q
    left = q.clone()
    left[elders] = 0
    if left.sum() <= 0:  # nothing left to draw: a drafter lists anything, and the rule must reject it
        return torch.nn.functional.one_hot(torch.tensor(0), V).double()
    if siblings == "distinct":
        return torch.nn.functional.one_hot(left.argmax(), V).double()
    return left / left.sum()


def all_drafts(draft: Model, parents: tuple[int, ...], siblings: str) -> dict[tuple[int, ...], float]:
    """Every token tree of one shape that the drafter may propose, with its probability."""
    drafts: dict[tuple[int, ...], float] = {(): 1.0}
    for parent in parents:
        longer = {}
        for tokens, weight in drafts.items():
            elders = [tokens[j] for j in range(len(tokens)) if parents[j] == parent]
            law = next_child_law(draft(path_of(parents, tokens, parent)), elders, siblings)
            longer.update({(*tokens, x): weight * law[x].item() for x in range(V) if law[x] > 0})
        drafts = longer
    return drafts


def round_laws(
    target: Model,
    draft: Model,
    rule: Rule,
    siblings: str,
    shapes: list[tuple[int, ...]] = SHAPES,
    listed: Callable[[tuple[int, ...], Tensor], tuple[int, ...]] = lambda tokens, q: tokens,
) -> list[dict[tuple[int, ...], float]]:
    """Law of what one round emits, for each shape; all shapes share one batch.

    `listed` reorders the drawn children of a flat tree before they are verified.
    """
    width = max(len(parents) for parents in shapes)
    origin, rows, weights = [], [], []
    for index, parents in enumerate(shapes):
        padding = (0,) * (width - len(parents))
        for drawn, weight in all_drafts(draft, parents, siblings).items():
            tokens = listed(drawn, draft(()))
            paths = [path_of(parents, tokens, node) for node in range(len(parents) + 1)] + [()] * len(padding)
            p = torch.stack([target(path) for path in paths])
            q = torch.stack([draft(path) for path in paths])
            rows.append((parents + padding, tokens + padding, len(parents), p, q))
            origin.append(index)
            weights.append(weight)
    coin = list(itertools.product(itertools.product([False, True], repeat=width), range(V)))
    n, m = len(rows), len(coin)

    def each_row(column: int) -> Tensor:
        """A column of `rows`, every entry repeated for all m combinations of coins."""
        values = [row[column] for row in rows]
        stacked = torch.stack(values) if isinstance(values[0], Tensor) else torch.tensor(values, dtype=torch.long)
        return stacked.repeat_interleave(m, 0)

    tree, tokens, counts = TokenTree(each_row(0).reshape(n * m, width)), each_row(1).reshape(n * m, width), each_row(2)
    decisions = torch.tensor([c for c, _ in coin], dtype=torch.bool).reshape(m, width).repeat(n, 1)
    coins = BranchingCoins(decisions, tree.real(counts), torch.tensor([t for _, t in coin]).repeat(n))
    verdict = rule(tree, tokens, counts, each_row(3), each_row(4), coins)
    emitted: list[dict[tuple[int, ...], float]] = [{} for _ in shapes]
    ids = torch.nn.functional.pad(tokens, (1, 0)).gather(1, verdict.nodes).tolist()
    for i, (accepted, token, weight) in enumerate(
        zip(verdict.accepted.tolist(), verdict.token.tolist(), coins.weight.tolist(), strict=True)
    ):
        if weight > 0:
            out, law = (*ids[i][1 : accepted + 1], token), emitted[origin[i // m]]
            law[out] = law.get(out, 0.0) + weights[i // m] * weight
    return emitted


def error(target: Model, draft: Model, rule: Rule, siblings: str, **variant) -> float:
    """Largest distance, over the shapes, between the law of the next DEPTH + 1 tokens and the target's own."""
    wanted = joint_law(target, DEPTH + 1)
    laws = round_laws(target, draft, rule, siblings, **variant)
    return max(total_variation(wanted, continued(law, target, DEPTH + 1)) for law in laws)


def mean_length(law: dict[tuple[int, ...], float]) -> float:
    return sum(len(out) * weight for out, weight in law.items())


def distinct(tree, tokens, counts, p, q, coins):
    return tree_rules.distinct(tree, tokens, counts, p, coins)


LOSSLESS = {
    "distinct": (distinct, "distinct"),
    "iid": (tree_rules.iid, "iid"),
    "without_replacement": (tree_rules.without_replacement, "without_replacement"),
    # The delta rule asks of the children only that they do not depend on its coins.
    "distinct on drawn children": (distinct, "without_replacement"),
    "distinct on repeated children": (distinct, "iid"),
}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("seed", range(3))
def test_the_emitted_tokens_have_exactly_the_targets_law(name, seed):
    assert error(Model(seed), Model(100 + seed), *LOSSLESS[name]) < EXACT


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("seed", range(2))
def test_zeros_in_p_and_q_are_handled(name, seed):
    """With two tokens of q left of three, a third child drawn without replacement finds q exhausted."""
    target, draft = Model(seed, zeros=True), Model(50 + seed, zeros=True)
    assert error(target, draft, *LOSSLESS[name]) < EXACT


@pytest.mark.parametrize("name", ["iid", "without_replacement"])
def test_a_draft_equal_to_the_target_loses_no_first_child(name):
    target = Model(8)
    for law in round_laws(target, target, *LOSSLESS[name], shapes=[(0, 1), (0, 0, 1)]):
        assert mean_length(law) == pytest.approx(3.0, abs=1e-12)


@pytest.mark.parametrize("name", ["distinct", "without_replacement"])
def test_children_that_cover_the_vocabulary_are_always_accepted(name):
    (law,) = round_laws(Model(1), Model(101), *LOSSLESS[name], shapes=[(0, 0, 0)])
    assert mean_length(law) == pytest.approx(2.0, abs=1e-12)


def test_more_children_emit_more_tokens():
    for name in ("distinct", "iid", "without_replacement"):
        laws = round_laws(Model(2), Model(102), *LOSSLESS[name], shapes=[(0,), (0, 0)])
        assert mean_length(laws[1]) > mean_length(laws[0]) + 0.01


@pytest.mark.parametrize("siblings", ["distinct", "iid", "without_replacement"])
@pytest.mark.parametrize("parents", [(), (0, 0), (0, 0, 1), (0, 0, 1, 2)])
def test_walking_along_choices_drawn_from_p_is_lossless_for_any_children(siblings, parents):
    target, draft = Model(4), Model(104)
    emitted: dict[tuple[int, ...], float] = {}
    for tokens, p_draft in all_drafts(draft, parents, siblings).items():
        laws = [target(path_of(parents, tokens, node)) for node in range(len(parents) + 1)]
        combos = list(itertools.product(range(V), repeat=len(laws)))
        rows = len(combos)
        verdict = tree_rules.walk(
            TokenTree.of(parents, rows, torch.device("cpu")),
            torch.tensor(tokens, dtype=torch.long).expand(rows, -1),
            torch.full((rows,), len(parents)),
            torch.tensor(combos),
        )
        for choices, accepted, nodes, token in zip(combos, *(x.tolist() for x in verdict), strict=True):
            weight = p_draft
            for law, y in zip(laws, choices, strict=True):
                weight *= law[y].item()
            out = (*(tokens[node - 1] for node in nodes[1 : accepted + 1]), token)
            emitted[out] = emitted.get(out, 0.0) + weight
    assert total_variation(joint_law(target, DEPTH + 1), continued(emitted, target, DEPTH + 1)) < EXACT


# A chain is a tree: the same coins must decide the same.


def random_chain(seed: int, dtype: torch.dtype = torch.float32):
    rows, k, vocab_size = 400, 5, 20
    g = torch.Generator().manual_seed(seed)
    p = (torch.randn(rows, k + 1, vocab_size, generator=g, dtype=dtype) * 2).softmax(-1)
    q = ((torch.randn(rows, k, vocab_size, generator=g, dtype=dtype) + p[:, :-1].log()) * 0.8).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).reshape(rows, k)
    counts = torch.randint(0, k + 1, (rows,), generator=g)
    seeds = torch.randint(0, 2**60, (rows,), generator=g)
    return tokens, counts, p, q, (seeds, torch.arange(rows))


def assert_same(verdict: tree_rules.TreeVerdict, wanted: rules.Verdict) -> None:
    assert torch.equal(verdict.accepted, wanted.accepted)
    assert torch.equal(verdict.token, wanted.token)
    places = torch.arange(verdict.nodes.shape[1]).expand_as(verdict.nodes)
    assert torch.equal(verdict.nodes, torch.where(places <= verdict.accepted[:, None], places, 0))


@pytest.mark.parametrize("seed", range(3))
def test_on_a_chain_the_tree_rules_decide_as_the_chain_rules(seed):
    tokens, counts, p, q, keys = random_chain(seed)
    tree = TokenTree.chain(*tokens.shape, tokens.device)
    wanted = rules.speculative(tokens, counts, p, q, CounterCoins(*keys))
    assert wanted.accepted.unique().numel() == tokens.shape[1] + 1  # every length occurs
    assert_same(tree_rules.iid(tree, tokens, counts, p, q, tree_rules.TreeCoins(*keys)), wanted)
    assert_same(tree_rules.without_replacement(tree, tokens, counts, p, q, tree_rules.TreeCoins(*keys)), wanted)

    one_hot = rules.one_hot(tokens, p.shape[-1], p.dtype)
    wanted = rules.speculative(tokens, counts, p, one_hot, CounterCoins(*keys))
    assert_same(tree_rules.distinct(tree, tokens, counts, p, tree_rules.TreeCoins(*keys)), wanted)

    choices = torch.where(torch.rand(p.shape[:2]) < 0.7, torch.nn.functional.pad(tokens, (0, 1)), p.argmax(-1))
    assert_same(tree_rules.walk(tree, tokens, counts, choices), rules.match(tokens, counts, choices))


def random_trees(seed: int, rows: int, k: int, vocab_size: int):
    """Rows with trees of different shape and size; padding holds other tokens."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.zeros(rows, k, dtype=torch.long)
    for row in range(rows):
        depths = [0]
        for j in range(k):  # a node's depth never falls, so that every prefix is a tree
            above = [i for i in range(j + 1) if depths[i] + 1 >= depths[-1]]
            parent = above[int(torch.randint(len(above), (1,), generator=g))]
            parents[row, j] = parent
            depths.append(depths[parent] + 1)
    p = torch.randn(rows, k + 1, vocab_size, generator=g).softmax(-1)
    q = torch.randn(rows, k + 1, vocab_size, generator=g).softmax(-1)
    tokens = torch.randint(0, vocab_size, (rows, k), generator=g)
    counts = torch.randint(0, k + 1, (rows,), generator=g)
    return parents, tokens, counts, p, q, torch.randint(0, 2**60, (rows,), generator=g)


class Recording(tree_rules.TreeCoins):
    """Real coins that note what they were asked."""

    thresholds = torch.zeros(0)
    weights = torch.zeros(0)

    def below(self, thresholds: Tensor) -> Tensor:
        self.thresholds = thresholds
        return super().below(thresholds)

    def draw(self, weights: Tensor) -> Tensor:
        self.weights = weights
        return super().draw(weights)


def test_the_delta_rule_tests_a_first_child_with_p_itself():
    """As the chain rule does, and not with p divided by its sum, which float32 rounds to something near 1."""
    tokens, counts, p, _, keys = random_chain(0)
    assert (p.sum(-1, dtype=torch.float64) != 1).any()
    coins = Recording(*keys)
    tree_rules.distinct(TokenTree.chain(*tokens.shape, tokens.device), tokens, counts, p, coins)
    assert torch.equal(coins.thresholds, p[:, :-1].gather(-1, tokens[..., None]).squeeze(-1).double())


ALL_RULES: dict[str, Rule] = {
    "walk": lambda tree, tokens, counts, p, q, coins: tree_rules.walk(tree, tokens, counts, p.argmax(-1)),
    "distinct": distinct,
    "iid": tree_rules.iid,
    "without_replacement": tree_rules.without_replacement,
    "typical": lambda tree, tokens, counts, p, q, coins: tree_rules.typical(tree, tokens, counts, p, coins),
}


@pytest.mark.parametrize("name", ALL_RULES)
def test_a_rows_verdict_depends_on_no_other_row_and_on_no_padding(name):
    rows, k = 40, 6
    parents, tokens, counts, p, q, seeds = random_trees(7, rows, k, vocab_size=4)
    parents = torch.where(torch.arange(k) < counts[:, None], parents, 0)
    positions = torch.zeros(rows, dtype=torch.long)
    rule = ALL_RULES[name]
    shared = Recording(seeds, positions)
    together = rule(TokenTree(parents), tokens, counts, p, q, shared)
    assert together.accepted.max() >= 2
    for b in range(rows):
        n = int(counts[b])
        own = Recording(seeds[b : b + 1], positions[b : b + 1])
        alone = rule(
            TokenTree(parents[b : b + 1, :n]),
            tokens[b : b + 1, :n],
            counts[b : b + 1],
            p[b : b + 1, : n + 1],
            q[b : b + 1, : n + 1],
            own,
        )
        assert torch.equal(own.weights, shared.weights[b : b + 1] if len(own.weights) else own.weights)
        length = int(alone.accepted)
        assert (length, int(alone.token)) == (int(together.accepted[b]), int(together.token[b]))
        assert alone.nodes[0, : length + 1].tolist() == together.nodes[b, : length + 1].tolist()
        assert together.nodes[b, length + 1 :].tolist() == [0] * (together.nodes.shape[1] - length - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL_RULES)
def test_the_device_decides_as_the_host(name):
    """In float64, where no coin falls between two roundings of one threshold."""
    parents, tokens, counts, p, q, seeds = random_trees(11, 40, 6, vocab_size=5)
    arguments = (parents, tokens, counts, p.double(), q.double(), seeds, torch.zeros_like(seeds))

    def verdict(device: str) -> list[list[int]]:
        parents, tokens, counts, p, q, seeds, positions = (x.to(device) for x in arguments)
        coins = tree_rules.TreeCoins(seeds, positions)
        return [x.tolist() for x in ALL_RULES[name](TokenTree(parents), tokens, counts, p, q, coins)]

    assert verdict("cuda") == verdict("cpu")


def test_real_coins_draw_the_targets_law():
    """100 000 rounds with counter coins in float32. An unbiased rule misses the bound with probability below 1e-6.

    Each frequency has a standard error of at most 0.0016; the bound is five of them.
    """
    rows, parents = 100_000, (0, 0, 1, 1)
    g = torch.Generator().manual_seed(0)
    p = torch.randn(5, 4, generator=g).mul(1.5).softmax(-1)
    q = torch.randn(5, 4, generator=g).mul(1.5).softmax(-1)

    def drawn(row: int) -> Tensor:
        return torch.multinomial(q[row].expand(rows, -1), 2, generator=g)  # without replacement, in drawn order

    tokens = torch.cat([drawn(0), drawn(1)], 1)
    verdict = tree_rules.without_replacement(
        TokenTree.of(parents, rows, torch.device("cpu")),
        tokens,
        torch.full((rows,), 4),
        p.expand(rows, -1, -1),
        q.expand(rows, -1, -1),
        tree_rules.TreeCoins(torch.full((rows,), 3), torch.arange(rows)),
    )
    ids = torch.cat([tokens, verdict.token[:, None]], 1)
    first = ids.gather(1, torch.where(verdict.accepted > 0, verdict.nodes[:, 1] - 1, 4)[:, None]).squeeze(1)
    assert (torch.bincount(first, minlength=4) / rows - p[0]).abs().max() < 5 * 0.0016
    # The second token of rounds that went through node 1 follows node 1's distribution.
    through = verdict.nodes[:, 1] == 1
    second = ids.gather(1, torch.where(verdict.accepted > 1, verdict.nodes[:, 2] - 1, 4)[:, None]).squeeze(1)[through]
    frequency = torch.bincount(second, minlength=4) / len(second)
    assert (frequency - p[1]).abs().max() < 5 * 0.5 / len(second) ** 0.5


def test_a_residual_that_rounds_to_nothing_falls_back_to_p():
    """p equals q but for rounding, and the coin says no: the closing token still comes from p."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    tree, tokens, counts = TokenTree.chain(1, 1, torch.device("cpu")), torch.tensor([[0]]), torch.tensor([1])

    class Rejecting:
        weights = torch.zeros(0)

        def below(self, thresholds: Tensor) -> Tensor:
            return torch.zeros_like(thresholds, dtype=torch.bool)

        def draw(self, weights: Tensor) -> Tensor:
            self.weights = weights
            return weights.argmax(-1)

    for rule in (tree_rules.iid, tree_rules.without_replacement):
        coins = Rejecting()
        rule(tree, tokens, counts, p, p[:, :1], coins)
        assert torch.equal(coins.weights, p[:, 0])
    certain = torch.tensor([[[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]])
    coins = Rejecting()
    tree_rules.distinct(tree, tokens, counts, certain, coins)
    assert torch.equal(coins.weights, certain[:, 0])


@pytest.mark.parametrize("rule", [tree_rules.iid, tree_rules.without_replacement])
def test_a_child_that_q_could_not_have_drawn_is_rejected(rule):
    """q of the drafted token underflowed to 0; p of it is 0.5, or 0 too."""
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], [[0.0, 0.8, 0.2], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.0, 0.4, 0.6]], [[0.0, 0.4, 0.6]]])
    tokens, counts = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long)
    coins = Recording(torch.tensor([1, 2]), torch.tensor([0, 0]))
    verdict = rule(TokenTree.chain(2, 1, tokens.device), tokens, counts, p, q, coins)
    assert coins.thresholds.tolist() == [[0.0], [0.0]]
    assert verdict.accepted.tolist() == [0, 0]


@pytest.mark.parametrize("rule", [tree_rules.iid, tree_rules.without_replacement])
def test_the_last_node_has_no_children_and_needs_no_q(rule):
    """One row stands on its last node, a leaf, while the other's tree goes on."""
    tree = TokenTree(torch.tensor([[0, 0], [0, 1]]))
    p, q = torch.tensor([0.1, 0.9, 0.0]).expand(2, 3, 3), torch.tensor([0.5, 0.5, 0.0]).expand(2, 3, 3)
    tokens, counts = torch.tensor([[0, 1], [1, 1]]), torch.tensor([2, 2])
    verdicts = []
    for rows_of_q in (q, q[:, :2]):
        coins = tree_rules.TreeCoins(torch.tensor([1, 2]), torch.tensor([0, 0]))
        verdicts.append([x.tolist() for x in rule(tree, tokens, counts, p, rows_of_q, coins)])
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][1] == [[0, 2, 0], [0, 1, 2]]


# Walking.


def test_a_walk_takes_the_first_of_equal_siblings():
    tree = TokenTree(torch.tensor([[0, 0, 1, 2]]))
    verdict = tree_rules.walk(tree, torch.tensor([[5, 5, 6, 7]]), torch.tensor([4]), torch.tensor([[5, 6, 7, 9, 9]]))
    assert verdict.nodes.tolist() == [[0, 1, 3]]
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([2], [9])


def test_a_walk_ignores_padding_that_would_match():
    tree = TokenTree(torch.tensor([[0, 0, 0]]))
    verdict = tree_rules.walk(tree, torch.tensor([[1, 5, 5]]), torch.tensor([1]), torch.tensor([[5, 0, 0, 0]]))
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([0], [5])


# Typical acceptance.


def peaked(*rows: list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64)


class Fixed:
    """Records what the closing token was to be drawn from."""

    def __init__(self) -> None:
        self.weights = torch.zeros(0)

    def below(self, thresholds: Tensor) -> Tensor:
        raise AssertionError("typical acceptance tosses no acceptance coins")

    def draw(self, weights: Tensor) -> Tensor:
        self.weights = weights
        return weights.argmax(-1)


def test_typical_acceptance_keeps_what_is_above_the_entropy_threshold():
    law = [0.9, 0.06, 0.04]
    entropy = -sum(x * torch.tensor(x, dtype=torch.float64).log().item() for x in law)
    threshold = 0.1 * torch.tensor(-entropy).exp().item()
    assert law[1] < threshold < law[0]
    p, chain, one = peaked(law, law), TokenTree.chain(1, 1, torch.device("cpu")), torch.tensor([1])
    for token, delta, kept in ((0, 0.1, 1), (1, 0.1, 0), (1, 0.08, 1)):
        coins = Fixed()
        verdict = tree_rules.typical(chain, torch.tensor([[token]]), one, p, coins, epsilon=1.0, delta=delta)
        assert verdict.accepted.tolist() == [kept]
    # epsilon caps the threshold.
    assert tree_rules.typical(chain, torch.tensor([[2]]), one, p, Fixed(), epsilon=0.03, delta=0.9).accepted == 1
    assert tree_rules.typical(chain, torch.tensor([[2]]), one, p, Fixed(), epsilon=0.05, delta=0.9).accepted == 0


def test_the_closing_token_of_typical_acceptance_obeys_the_threshold_too():
    p, coins = peaked([0.5, 0.45, 0.05], [0.1, 0.2, 0.7]), Fixed()
    tree, one = TokenTree.chain(1, 1, torch.device("cpu")), torch.tensor([1])
    tree_rules.typical(tree, torch.tensor([[2]]), one, p, coins)
    assert coins.weights.tolist() == [[0.5, 0.45, 0.0]]  # epsilon 0.09 cuts the third token
    greedy = tree_rules.typical(tree, torch.tensor([[0]]), one, p, None)
    assert (greedy.accepted.tolist(), greedy.token.tolist()) == ([1], [2])


def test_typical_acceptance_takes_the_longest_path_and_breaks_ties_by_likelihood():
    """Two paths of length 2 under the root's two children and one of length 1: the likeliest long one is kept."""
    tree = TokenTree(torch.tensor([[0, 0, 0, 1, 2]]))
    tokens, count = torch.tensor([[0, 1, 2, 0, 0]]), torch.tensor([5])
    root, flat = [0.4, 0.3, 0.3], [0.5, 0.25, 0.25]
    likely = [0.9, 0.05, 0.05]
    p = peaked(root, flat, likely, flat, flat, flat)
    verdict = tree_rules.typical(tree, tokens, count, p, Fixed())
    assert verdict.nodes.tolist() == [[0, 2, 5]]  # 0.3 * 0.9 > 0.4 * 0.5
    late = peaked([0.3, 0.4, 0.3], flat, flat, flat, flat, flat)
    assert tree_rules.typical(tree, tokens, count, late, Fixed()).nodes.tolist() == [[0, 2, 5]]  # the whole path counts
    p = peaked(root, flat, flat, flat, flat, flat)
    assert tree_rules.typical(tree, tokens, count, p, Fixed()).nodes.tolist() == [[0, 1, 4]]
    equal = peaked([0.4, 0.4, 0.2], flat, flat, flat, flat, flat)
    assert tree_rules.typical(tree, tokens, count, equal, Fixed()).nodes.tolist() == [[0, 1, 4]]  # the first of equals
    shortened = tree_rules.typical(tree, tokens, torch.tensor([3]), p, Fixed())
    assert shortened.nodes[:, :2].tolist() == [[0, 1]]
    assert shortened.accepted.tolist() == [1]


# Known-bad variants: the same proof must reject each of them.


def worst(rule: Rule, siblings: str, shapes: list[tuple[int, ...]], seeds: int = 12, **variant) -> float:
    return max(error(Model(s), Model(300 + s), rule, siblings, shapes=shapes, **variant) for s in range(seeds))


def test_control_counting_repeated_children_twice_under_the_delta_rule_is_found():
    def double_counting(tree, tokens, counts, p, q, coins):
        """The delta rule for two children of the root, blind to their being one token."""
        mass = p[:, 0].gather(1, tokens)
        left = 1 - mass[:, 0]
        passed = coins.below(torch.stack([mass[:, 0], (mass[:, 1] / left).clamp(max=1)], 1))
        node = torch.where(passed[:, 0], 1, torch.where(passed[:, 1], 2, 0))
        rest = p[:, 0].scatter(1, tokens, 0.0)
        weights = torch.where((node > 0)[:, None], p[torch.arange(len(p)), node], rest)
        path = torch.stack([torch.zeros_like(node), node], 1)
        return tree_rules.TreeVerdict((node > 0).long(), path, coins.draw(weights))

    assert worst(double_counting, "distinct", [(0, 0)]) < EXACT  # the variant is right where tokens are distinct
    assert worst(double_counting, "iid", [(0, 0)]) > 0.1


def test_control_fixed_q_on_children_without_replacement_is_found():
    """What the SpecInfer baseline of Sequoia's code does: the rule for independent children, who were not."""
    assert worst(tree_rules.iid, "without_replacement", [(0, 0)]) > 0.05


def test_control_forgetting_the_update_of_q_is_found():
    def forgetful(tree, tokens, counts, p, q, coins):
        """Q loses the rejected token but is not scaled back to a distribution."""
        return in_turn(tokens, p, q, coins, scale_q=False)

    assert worst(lambda tree, tokens, counts, *rest: in_turn(tokens, *rest), "without_replacement", [(0, 0)]) < EXACT
    assert worst(forgetful, "without_replacement", [(0, 0)]) > 0.05


def test_control_dropping_the_update_of_p_is_found():
    def forgetful(tree, tokens, counts, p, q, coins):
        return in_turn(tokens, p, q, coins, update_p=False)

    assert worst(forgetful, "without_replacement", [(0, 0)]) > 0.05


def in_turn(
    tokens: Tensor, p: Tensor, q: Tensor, coins: BranchingCoins, *, update_p: bool = True, scale_q: bool = True
) -> tree_rules.TreeVerdict:
    """Sequoia's rule written plainly for two children of the root; a switch for each step that can be forgotten."""
    row = torch.arange(len(tokens))
    left, source = p[:, 0], q[:, 0]
    node = torch.zeros_like(row)
    for i in range(2):
        token, threshold = tokens[:, i], torch.zeros(tokens.shape, dtype=p.dtype)
        chance = torch.where(source[row, token] > 0, left[row, token] / source[row, token], 0).clamp(max=1)
        threshold[:, i] = torch.where(node == 0, chance, 0)
        node = torch.where(coins.below(threshold)[:, i], i + 1, node)
        if update_p:
            rest = (left - source).clamp(min=0)
            left = torch.where(rest.sum(-1, keepdim=True) > 0, rest / rest.sum(-1, keepdim=True), left)
        source = source.scatter(1, token[:, None], 0.0)
        if scale_q:
            source = source / source.sum(-1, keepdim=True)
    closing = torch.where((node > 0)[:, None], p[row, node], left)
    path = torch.stack([torch.zeros_like(node), node], 1)
    return tree_rules.TreeVerdict((node > 0).long(), path, coins.draw(closing))


def test_control_verifying_drawn_children_in_sorted_order_is_found():
    def by_probability(tokens, q):
        return tuple(sorted(tokens, key=lambda token: -q[token].item()))

    assert worst(tree_rules.without_replacement, "without_replacement", [(0, 0)], listed=by_probability) > 0.05


def test_control_verifying_chosen_children_as_if_drawn_is_found():
    assert worst(tree_rules.without_replacement, "distinct", [(0, 0)]) > 0.1


def test_control_typical_acceptance_is_found():
    assert worst(ALL_RULES["typical"], "distinct", [(0, 0, 1)]) > 0.1
