"""A decoder that also notes, at every place where something was drafted, what the draft preferred there.

The note is a function of the text so far: the distribution that the draft's tokens were drawn from, or the set of
tokens that a deterministic draft offers. So it may decide which tokens are counted there (see `statistics`). A drawn
token may not: whether it is emitted depends on its being drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafter import Draft, Drafter, Round
from spectune.decoding.stopping import StopRule
from spectune.decoding.tree import TokenTree
from spectune.decoding.verification import Verified


class Witness(Decoder):
    """A Decoder with `preferences`: (request seed, position) -> [V], the draft's q or 1 for each offered token.

    Under `match` nothing is noted: there the draft sees the target's coins.
    """

    def __init__(self, target: CausalModel, drafter: Drafter, settings: DecodeSettings, stop: StopRule) -> None:
        super().__init__(target, drafter, settings, stop)
        self.preferences: dict[tuple[int, int], Tensor] = {}

    def _verify(self, newest: Tensor, draft: Draft | None, round_: Round) -> Verified:
        verified = super()._verify(newest, draft, round_)
        if draft is not None and self.rule != "match":
            self._note(draft, round_, verified)
        return verified

    def _note(self, draft: Draft, round_: Round, verified: Verified) -> None:
        """Along each row's accepted path, the root's children first."""
        rows, width = draft.tokens.shape
        tree = draft.tree or TokenTree.chain(rows, width, draft.tokens.device)
        q = draft.probabilities if draft.tree is None or draft.siblings != "distinct" else None
        real = tree.real(draft.counts)
        for b, (row, accepted, path) in enumerate(
            zip(round_.rows, verified.summary[:, 2].tolist(), verified.path.tolist(), strict=True)
        ):
            for depth, node in enumerate(path[: accepted + 1]):
                children = draft.tokens[b, (tree.parents[b] == node) & real[b]]
                if len(children) == 0:
                    continue  # the path's end was a leaf: its token is the target's own
                if q is None:
                    preference = torch.zeros(self.target.vocab_size, device=draft.tokens.device).index_fill_(
                        0, children, 1.0
                    )
                else:
                    preference = q[b, node].clone()  # not a view: that would keep the whole round's q
                self.preferences[row.seed, row.length + depth] = preference
