"""Prompt lookup: propose what followed the current ending before (Saxena 2023; vLLM's `ngram`).

A chain is what followed last time; a tree holds what followed several times, merged where they agree.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectune.decoding.cache import send
from spectune.decoding.drafter import Draft, Kept, Round, Row
from spectune.decoding.tree import TokenTree

MIN_NGRAM = 1
MAX_NGRAM = 4

# How a tree weighs continuations: those of a match shorter by a token count a quarter, and half a vote always goes to
# what was never seen. Fitted to texts of SmolLM2 (chat, code, editing, summaries), where halving or doubling either
# changes the tokens per round by 1 % at most.
_SHORTER = 0.25
_UNSEEN = 0.5
_LOOK_AT = 4  # continuations per node of the tree


class TrieNode(NamedTuple):
    """A drafted token; `parent` counts from 1 in the list it stands in, 0 is the root."""

    token: int
    parent: int
    depth: int


class NgramIndex:
    """Where each n-gram of a growing text was continued.

    An n-gram is entered when the token behind it arrives, so the text's own ending never matches itself.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)  # longest first
        self.continuations: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index `tokens`, of which a prefix has been indexed before."""
        for end in range(max(self.indexed, 1), len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.continuations[tuple(tokens[end - n : end])].append(end)
        self.indexed = len(tokens)

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Length of the matching ending and place of what followed: longest first, then most recent first."""
        seen: set[int] = set()
        for n in self.sizes:
            if n <= len(tokens):
                for place in reversed(self.continuations.get(tuple(tokens[-n:]), ())):
                    if place not in seen:
                        seen.add(place)
                        yield n, place

    def lookup(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that followed the longest, then most recent, match of the ending."""
        for _, place in self.matches(tokens):
            return list(tokens[place : place + limit])
        return []

    def trie(self, tokens: Sequence[int], nodes: int, limit: int, stop_ids: Collection[int]) -> list[TrieNode]:
        """The likeliest continuations as a tree of up to `nodes` tokens, none deeper than `limit`, sorted by depth.

        The chance of a token behind a path is its share of the continuations that took the path; the likeliest paths
        are kept, of equal ones the one of the longer, then more recent match. Nothing follows a stop token.
        """
        votes: list[tuple[float, int]] = []
        for n, place in self.matches(tokens):
            votes.append((_SHORTER ** (self.sizes[0] - n), place))
            if len(votes) == _LOOK_AT * nodes:
                break
        if not votes or limit == 0:
            return []
        unseen = _UNSEEN * votes[0][0]
        found: list[TrieNode] = []
        heap = [(-1.0, 0, TrieNode(-1, 0, 0), votes)]
        age = 0
        while heap and len(found) <= nodes:
            score, _, node, votes = heapq.heappop(heap)
            found.append(node)
            if node.depth == limit or node.token in stop_ids:
                continue
            followers: dict[int, list[tuple[float, int]]] = defaultdict(list)
            for weight, place in votes:
                if place < len(tokens):
                    followers[tokens[place]].append((weight, place + 1))
            total = sum(weight for weight, _ in votes) + unseen
            for token, group in followers.items():
                age += 1
                chance = score * sum(weight for weight, _ in group) / total
                heapq.heappush(heap, (chance, age, TrieNode(token, len(found) - 1, node.depth + 1), group))
        # The root was found first; a stable sort keeps it there and siblings in the order of their chances.
        order = sorted(range(len(found)), key=lambda i: found[i].depth)
        number = {old: new for new, old in enumerate(order)}
        return [found[old]._replace(parent=number[found[old].parent]) for old in order[1:]]


class NgramDrafter:
    """Drafts by lookup in the row's own text; has no weights and takes no forward."""

    device: torch.device | None = None
    taps: tuple[int, ...] = ()

    def __init__(self, min_n: int = MIN_NGRAM, max_n: int = MAX_NGRAM) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self.indexes: list[NgramIndex] = []

    def start(self, rows: int, capacity: int) -> None:
        self.indexes = [NgramIndex(self.min_n, self.max_n) for _ in range(rows)]

    def admit(self, index: int, row: Row, states: Tensor | None = None) -> None:
        self.indexes[index] = NgramIndex(self.min_n, self.max_n)
        self.indexes[index].extend(row.tokens)

    def propose(self, round_: Round) -> Draft | None:
        found = [
            index.lookup(row.tokens, limit)
            for index, row, limit in zip(self.indexes, round_.rows, round_.limits, strict=False)
        ]
        width = max(map(len, found))
        if width == 0:
            return None
        tokens = send([f + [0] * (width - len(f)) for f in found], round_.device)
        counts = send([len(f) for f in found], round_.device)
        return Draft(tokens, torch.minimum(counts, round_.counts_before_stop(tokens)), None, 0)

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        for index, row in zip(self.indexes, rows, strict=False):
            index.extend(row.tokens)

    def move(self, source: int, destination: int) -> None:
        self.indexes[destination] = self.indexes[source]


class NgramTreeDrafter(NgramDrafter):
    """Drafts several continuations at once, as a tree of `Round.nodes` tokens."""

    def propose(self, round_: Round) -> Draft | None:
        round_.refuse_block()
        stop_ids = set(round_.stop_ids.tolist())
        found = [
            index.trie(row.tokens, round_.nodes, limit, stop_ids)
            for index, row, limit in zip(self.indexes, round_.rows, round_.limits, strict=False)
        ]
        width = max(map(len, found))
        if width == 0:
            return None
        padded = [f + [TrieNode(0, 0, 1)] * (width - len(f)) for f in found]
        tokens, parents, _ = send(padded, round_.device).unbind(-1)
        counts = send([len(f) for f in found], round_.device)
        # A fixed bound where rounds are recorded: the depth found would make a recording for each.
        levels = round_.nodes if round_.fixed else max(f[-1].depth for f in found if f)
        return Draft(tokens, counts, None, 0, TokenTree(parents, levels=levels))
