"""How far rounding moves a choice of the target, at each place of an output.

Measured by decoding the output in three exact ways, each with its own cache: all at once, as verifications do (K + 1
tokens a forward), and as plain decoding does. Most of the rounding comes with the keys and values of the text before,
so ways that share a cache would miss it.

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
from spectune.sweeping.cell import CellSpec, Sampling
from spectune.verifying.exact import chosen, forced_logits


class Noise:
    """The output of a request, seen in three ways.

    `choices` is what the target chooses at each place of the output from the text before it.
    """

    def __init__(self, model: CausalModel, request: Request, output: Sequence[int], spec: CellSpec) -> None:
        self.sampling: Sampling = spec.sampling
        self.eps: float = torch.finfo(model.model.dtype).eps
        self.ways = torch.stack(
            [
                forced_logits(model, request.token_ids, [output], spec.sampling, width=width, copies=copies)[0]
                for width, copies in ((None, 1), (spec.k + 1, spec.batch), (1, spec.batch))
            ]
        )  # [3, n, V]
        self.choices = chosen(self.ways[0], request, spec.sampling)
        best = self.ways[0].topk(2).indices.tolist()
        self.typical = median(self._at(place, pair) for place, pair in enumerate(best))

    def at(self, place: int, tokens: Sequence[int]) -> float:
        """Greedy: how far rounding moves the distance of two tokens' logits. Sampled: an edge of an interval in which
        the coin may fall."""
        return max(self.typical, self._at(place, tokens))

    def explains(self, gap: float, place: int, tokens: Sequence[int]) -> bool:
        """Whether a choice that is `gap` away from the target's own is a numeric tie."""
        return gap <= max(NOISE_FACTOR * self.at(place, tokens), self._floor(place))

    def margin(self, place: int) -> float:
        """Distance of the two best logits."""
        best, second = self.ways[0, place].topk(2).values.tolist()
        return float(best - second)

    def _at(self, place: int, tokens: Sequence[int]) -> float:
        logits = self.ways[:, place]  # [3, V]
        if is_greedy(self.sampling):
            return _range(logits[:, tokens[0]] - logits[:, tokens[1]])
        return _range(probabilities(logits, self.sampling).double().cumsum(-1))

    def _floor(self, place: int) -> float:
        """Two units in the last place: of the largest logit, or of a probability of 1."""
        if not is_greedy(self.sampling):
            return ULPS * self.eps
        largest = self.ways[0, place].abs().max()
        return float(ULPS * self.eps * 2.0 ** torch.floor(torch.log2(largest)))


def _range(values: Tensor) -> float:
    """The largest difference between the ways. [3, ...]"""
    return float((values.amax(0) - values.amin(0)).max())
