"""A round's verification: one forward of the target over the draft, and the rule that decides what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import spectune.decoding.tree_rules as tree_rules
from spectune.decoding import fused, rules
from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step, Tail
from spectune.decoding.drafter import Draft, Round, no_draft
from spectune.decoding.graphs import Graphs
from spectune.decoding.random import CounterCoins, Stream, pick, uniform
from spectune.decoding.sampling import probabilities
from spectune.decoding.synthetic import SyntheticAcceptance
from spectune.decoding.tree import TokenTree

OnVerdict = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class Verified(NamedTuple):
    """What a round decided, on the target's device."""

    summary: Tensor  # [B, 4 + D] offered depth and nodes, accepted, closing token, the tokens along the path
    path: Tensor  # [B, D + 1] the root and the kept nodes in order, padded with 0
    states: Tensor | None  # [B, K + 1, taps * h] the target's states at every node


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies drafts against a target.

    Args:
        taps: the target's states that the drafter reads.
        graphs: record the verification, the moving of a tree's path in the cache included; None: call it.
        synthetic: overrides the rule's verdict on whatever was drafted.
        on_verdict: hears p, q, counts and what was accepted, where a chain is decided by drawing.
    """

    target: CausalModel
    store: KVStore
    taps: tuple[int, ...]
    graphs: Graphs | None = None
    synthetic: SyntheticAcceptance | None = None
    on_verdict: OnVerdict | None = None

    def verify(self, newest: Tensor, draft: Draft | None, round_: Round) -> Verified:
        """Verify a round. newest [B, 1]: the rows' last tokens."""
        draft = draft or no_draft(len(newest), newest.device)
        if self.graphs is not None:
            return self._recorded(self.graphs, newest, draft, round_)
        starts = tuple(row.length - 1 for row in round_.rows)
        tail = None if draft.tree is None else Tail(starts, draft.tree.depths, draft.tree.ancestors)
        width = 1 + draft.tokens.shape[1]
        return self._verify(newest, draft, round_, Step(0, starts, width, newest.device, tail))

    def _recorded(self, graphs: Graphs, newest: Tensor, draft: Draft, round_: Round) -> Verified:
        tree, fixed = draft.tree, _padded(draft, round_.nodes)
        levels = None if tree is None else tree.levels
        alone = replace(self, graphs=None)  # recordings that held themselves would outlive their cell

        def verify(given: dict[str, Any]) -> dict[str, Any]:
            inside = round_.on(given)
            starts = inside.numbers(newest.device).positions - 1
            shape = None if tree is None else TokenTree(given["parents"], levels, draft.breadths)
            drafted = Draft(given["tokens"], given["counts"], given["q"], draft.steps, shape, draft.siblings)
            tail = None if shape is None else Tail(starts, shape.depths, shape.ancestors)
            step = Step(0, starts, 1 + drafted.tokens.shape[1], newest.device, tail, alone.store.capacity)
            verified = alone._verify(given["newest"], drafted, inside, step)
            if shape is not None:
                # Where the host cuts a row's path short, the row has ended and its cache is never read again.
                alone.store.compact_all(starts, verified.path, verified.summary[:, 2].contiguous())
            return verified._asdict()

        if tree is not None:
            fused.prepare(self.store)
        inputs = {
            "newest": newest,
            "tokens": fixed.tokens,
            "counts": fixed.counts,
            "q": fixed.probabilities,
            "parents": None if fixed.tree is None else fixed.tree.parents,
            **round_.inputs(newest.device),
        }
        name = ("verify", round_.rule, round_.sampling, self.taps, levels, draft.siblings, draft.breadths)
        return Verified(**graphs.run(name, verify, inputs))

    def _verify(self, newest: Tensor, draft: Draft, round_: Round, step: Step) -> Verified:
        ids = torch.cat([newest, draft.tokens], 1)
        if self.taps:
            logits, states = self.target.forward_with_states(ids, step, self.store, self.taps)
        else:
            logits, states = self.target.forward(ids, step, self.store), None
        verdict = accept(logits, draft, round_, self.on_verdict)
        if self.synthetic is not None and draft.tokens.shape[1] > 0:
            verdict = self.synthetic(logits, draft, round_)
        summary = torch.cat(
            [_offered(draft), verdict.accepted[:, None], verdict.token[:, None], ids.gather(1, verdict.nodes[:, 1:])], 1
        )
        return Verified(summary, verdict.nodes, states)


def accept(logits: Tensor, draft: Draft, round_: Round, on_verdict: OnVerdict | None = None) -> tree_rules.TreeVerdict:
    """Apply the round's rule. logits [B, K + 1, V]."""
    if draft.tree is not None:
        return _accept_tree(logits, draft, draft.tree, round_)
    if round_.rule == "typical":
        chain = TokenTree.chain(draft.tokens.shape[0], draft.tokens.shape[1], logits.device)
        return _accept_tree(logits, draft, chain, round_)
    verdict = _accept_chain(round_.history.apply_block(logits, draft.tokens), draft, round_, on_verdict)
    places = torch.arange(draft.tokens.shape[1] + 1, device=logits.device).expand(logits.shape[0], -1)
    path = places.masked_fill(places > verdict.accepted[:, None], 0)
    return tree_rules.TreeVerdict(verdict.accepted, path, verdict.token)


def _accept_chain(logits: Tensor, draft: Draft, round_: Round, on_verdict: OnVerdict | None) -> rules.Verdict:
    if on_verdict is None and (verdict := fused.accept(logits, draft, round_)) is not None:
        return verdict
    tokens, counts = draft.tokens, draft.counts
    if round_.rule == "greedy":
        return rules.match(tokens, counts, _likeliest(logits))
    p = probabilities(logits, round_.sampling)
    if round_.rule == "match":
        verdict = rules.match(tokens, counts, _choices(p, round_, torch.arange(p.shape[1], device=p.device)))
        return verdict._replace(token=_or_nothing(verdict.token, p))
    q = draft.probabilities
    if q is None:
        q = rules.one_hot(tokens, p.shape[-1], p.dtype)
    rule = rules.block if round_.rule == "block" else rules.speculative
    verdict = rule(tokens, counts, p, q, CounterCoins(round_.seeds(p.device), round_.positions(p.device)))
    if on_verdict:
        on_verdict(p, q, counts, verdict.accepted)
    return verdict._replace(token=_or_nothing(verdict.token, p, q))


def _accept_tree(logits: Tensor, draft: Draft, tree: TokenTree, round_: Round) -> tree_rules.TreeVerdict:
    tokens, counts, q = draft.tokens, draft.counts, draft.probabilities
    logits = round_.history.apply_tree(logits, tokens, tree.parents)
    if round_.rule == "greedy":
        return tree_rules.walk(tree, tokens, counts, _likeliest(logits))
    p = probabilities(logits, round_.sampling)
    verdict = _draw(p, draft, tree, round_)
    return verdict._replace(token=_or_nothing(verdict.token, p, *([] if q is None else [q])))


def _draw(p: Tensor, draft: Draft, tree: TokenTree, round_: Round) -> tree_rules.TreeVerdict:
    tokens, counts, q = draft.tokens, draft.counts, draft.probabilities
    if round_.rule == "match":
        return tree_rules.walk(tree, tokens, counts, _choices(p, round_, tree.depths))
    coins = tree_rules.TreeCoins(round_.seeds(p.device), round_.positions(p.device))
    if round_.rule == "typical":
        return tree_rules.typical(tree, tokens, counts, p, coins)
    if draft.siblings == "distinct" or q is None:
        return tree_rules.distinct(tree, tokens, counts, p, coins)
    rule = tree_rules.iid if draft.siblings == "iid" else tree_rules.without_replacement
    return rule(tree, tokens, counts, p, q, coins)


def _likeliest(logits: Tensor) -> Tensor:
    """[B, K + 1, V] -> [B, K + 1] ids; -1 where logits are not finite, as torch holds NaN to be the largest number."""
    best = logits.argmax(-1)
    is_finite = logits.gather(-1, best[..., None]).squeeze(-1).isfinite()
    return torch.where(is_finite, best, -1)


def _or_nothing(token: Tensor, *distributions: Tensor) -> Tensor:
    """Closing tokens [B]; -1 where a distribution [B, n, V] is none: logits that overflow make all of a row NaN."""
    for x in distributions:
        token = torch.where(x[..., 0].isfinite().all(-1), token, -1)
    return token


def _choices(p: Tensor, round_: Round, depths: Tensor) -> Tensor:
    """[B, K + 1] what the target's own coins choose at every node, from its depth."""
    positions = round_.positions(p.device)[:, None] + depths
    u = uniform(round_.seeds(p.device)[:, None], Stream.TARGET, positions, torch.zeros_like(positions))
    return pick(p, u)


def _offered(draft: Draft) -> Tensor:
    """[B, 2] longest path and number of nodes of each row's draft."""
    if draft.tree is None or draft.tokens.shape[1] == 0:
        return torch.stack([draft.counts, draft.counts], 1)
    real = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.counts[:, None]
    return torch.stack([(draft.tree.depths[:, 1:] * real).amax(1), draft.counts], 1)


def _padded(draft: Draft, k: int) -> Draft:
    """A draft of K places if it has any: what is offered may vary, the shape of the verification may not."""
    lacking = k - draft.tokens.shape[1]
    if lacking <= 0 or draft.tokens.shape[1] == 0:
        return draft
    pad = torch.nn.functional.pad
    q, tree = draft.probabilities, draft.tree
    return draft._replace(
        tokens=pad(draft.tokens, (0, lacking)),
        probabilities=None if q is None else pad(q, (0, 0, 0, lacking)),
        tree=None if tree is None else TokenTree(pad(tree.parents, (0, lacking)), tree.levels),
    )
