"""Drafting with an MLP speculator: a small recurrent step per token, started from the target's last state."""

from __future__ import annotations

from torch import Tensor, nn

from spectune.decoding.cache import send
from spectune.decoding.draft_choice import chain, choose
from spectune.decoding.drafter import Draft, Round, draft_recorded
from spectune.decoding.last_state import LastState
from spectune.decoding.product import Product
from spectune.heads.mlp import MlpSpeculator


class MlpDrafter(LastState):
    """Drafts a chain; each token depends on those before it.

    Args:
        speculator: checked against the target, on its device and in its type. Its products are packed in place.
        layers: of the target.
        target_vocab: width of the target's distributions.
        product: what multiplies with its matrices.
    """

    def __init__(
        self, speculator: MlpSpeculator, *, layers: int, target_vocab: int, product: type[Product] = Product
    ) -> None:
        super().__init__(layers, next(speculator.parameters()), speculator.config.hidden_size)
        self.target_vocab = target_vocab
        self.speculator = speculator
        for modules in (speculator.proj, speculator.head):
            for index, module in enumerate(modules):
                modules[index] = _Packed(module, product)

    def propose(self, round_: Round) -> Draft | None:
        limits = [min(limit, self.speculator.config.steps) for limit in round_.limits]
        if max(limits) == 0:
            return None
        steps = min(round_.places(limits), self.speculator.config.steps)
        state = self.state[: round_.count]
        device = state.device
        newest = send([row.tokens[-1] for row in round_.rows], device)
        if self.graphs is None:
            return self._draft(state, newest, steps, round_, round_.numbers(device, limits).limits)
        out = draft_recorded(
            self.graphs,
            ("mlp", id(self), steps),
            round_,
            {"state": state, "newest": newest} | round_.inputs(device, limits),
            lambda given, inside: self._draft(
                given["state"], given["newest"], steps, inside, inside.numbers(device).limits
            ),
        )
        return Draft(out["tokens"], out["counts"], out["q"], steps)

    def _draft(self, state: Tensor, newest: Tensor, steps: int, round_: Round, limits: Tensor) -> Draft:
        """Draft `steps` tokens from states [B, h] and the newest tokens [B]; limits [B]."""
        state = self.speculator.start(state)
        # A padding id only the target has becomes the speculator's last one.
        newest = newest.clamp(max=self.speculator.config.vocab_size - 1)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for place in range(steps):
            state = self.speculator.advance(place, state, tokens[-1] if tokens else newest)
            token, q = choose(self.speculator.logits(place, state), tokens, round_, None)
            tokens.append(token)
            distributions.append(q)
        return chain(tokens, distributions, limits.to(round_.device), round_, None, self.target_vocab, steps)


class _Packed(nn.Module):
    """A linear layer whose weight is laid out for the processor."""

    def __init__(self, linear: nn.Module, product: type[Product]) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.product = product.of(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
