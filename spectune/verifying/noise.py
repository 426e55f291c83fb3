"""How far rounding moves a choice of the target, at each place of an output.

Measured by decoding the output in exact ways, each with its own cache: as a prompt is read, all behind the prompt at
once, as verifications do (K + 1 tokens a forward), and as plain decoding does. Most of the rounding comes with the keys
and values of the text before, so ways that share a cache would miss it.

One place is one draw of a random quantity, which may come out small by chance; so at least the output's typical value
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.sampling import is_greedy, probabilities
from spectune.engines.difference import NOISE_FACTOR, ULPS
from spectune.engines.engine import Request
from spectune.sweeping.cell import CellSpec
from spectune.verifying.exact import chosen, coins, forced_logits, prefilled_logits


class Noise:
    """The output of a request, seen in W exact ways.

    `choices` is what the target chooses at each place of the output from the text before it.
    """

    def __init__(self, model: CausalModel, request: Request, output: Sequence[int], spec: CellSpec) -> None:
        self.sampling = spec.sampling
        self.eps: float = torch.finfo(model.model.dtype).eps
        prompt = request.token_ids
        ways = [prefilled_logits(model, prompt, output, spec.sampling)]
        for width, copies in ((None, 1), (spec.k + 1, spec.batch), (1, spec.batch)):
            ways.append(forced_logits(model, prompt, [output], spec.sampling, width=width, copies=copies))
        self.ways = torch.cat(ways)  # [W, n, V]
        self.choices = chosen(self.ways[-1], request, spec.sampling)
        self.coins = coins(request, len(output), model.device).tolist()
        best = self.ways[-1].topk(2).indices.tolist()
        self.typical = median(self._spread(place, pair) for place, pair in enumerate(best))

    def gap(self, place: int, tokens: Sequence[int]) -> float:
        """How far a choice between two tokens is from being even.

        Greedy: how far the less likely one's logit lies below the best. Sampled: how far the coin lies outside of the
        interval of the cumulative distribution that belongs to the farther one.
        """
        if is_greedy(self.sampling):
            logits = self.ways[:, place]
            return float((logits.amax(-1) - logits[:, list(tokens)].amin(-1)).min())
        edges, coin = self._edges(place), self.coins[place]
        below = torch.nn.functional.pad(edges, (1, 0))[:, :-1]
        outside = torch.maximum(below - coin, coin - edges).clamp(min=0)
        return float(outside[:, list(tokens)].amax(-1).min())

    def at(self, place: int, tokens: Sequence[int]) -> float:
        """How far rounding moves that. Greedy: the distance of the two logits; sampled: the edges."""
        return max(self.typical, self._spread(place, tokens))

    def explains(self, place: int, tokens: Sequence[int]) -> bool:
        """Whether a choice between two tokens is a numeric tie."""
        return self.gap(place, tokens) <= max(NOISE_FACTOR * self.at(place, tokens), self._floor(place))

    def margin(self, place: int) -> float:
        """Distance of the two best logits, as plain decoding computes them."""
        best, second = self.ways[-1, place].topk(2).values.tolist()
        return float(best - second)

    def _spread(self, place: int, tokens: Sequence[int]) -> float:
        if not is_greedy(self.sampling):
            return _range(self._edges(place))
        logits = self.ways[:, place]
        return _range(logits[:, tokens[0]] - logits[:, tokens[1]])

    def _edges(self, place: int) -> Tensor:
        """[W, V] where each token's interval ends."""
        edges = probabilities(self.ways[:, place], self.sampling).double().cumsum(-1)
        return edges / edges[:, -1:]

    def _floor(self, place: int) -> float:
        """Two units in the last place: of the largest logit, or of a probability of 1."""
        if not is_greedy(self.sampling):
            return ULPS * self.eps
        largest = self.ways[-1, place].abs().max()
        return float(ULPS * self.eps * 2.0 ** torch.floor(torch.log2(largest)))


def _range(values: Tensor) -> float:
    """The largest difference between the ways. [W, ...]"""
    return float((values.amax(0) - values.amin(0)).max())
