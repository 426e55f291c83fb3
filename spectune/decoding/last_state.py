"""Memory of drafters that start from one state of the target: that of the last token it has processed in every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.cache import send
from spectune.decoding.drafter import Kept, Row
from spectune.decoding.graphs import Graphs


class LastState:
    """One state per row, packed as the decoder's rows are.

    Args:
        layers: of the target; the state is the one behind its last layer and final norm.
        like: its device and type are those of the states.
        hidden_size: h.
    """

    def __init__(self, layers: int, like: Tensor, hidden_size: int) -> None:
        self.taps: tuple[int, ...] = (layers,)
        self.device: torch.device | None = like.device
        self.graphs: Graphs | None = None
        self.state = torch.zeros(0, hidden_size, dtype=like.dtype, device=like.device)

    def record_with(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def start(self, rows: int, capacity: int) -> None:
        self.state = self.state.new_zeros(rows, self.state.shape[1])

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        assert states is not None, "the decoder hands over the taps that a drafter names"
        self.state[index] = states[-1]

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        """The newest token follows the last accepted node, whose state is the next round's."""
        assert kept.states is not None
        accepted = send(kept.accepted, kept.path.device)
        node = kept.path.gather(1, accepted[:, None])[:, 0]
        row = torch.arange(len(rows), device=node.device)
        self.state[: len(rows)] = kept.states[row, node].to(self.state.device)

    def move(self, source: int, destination: int) -> None:
        self.state[destination] = self.state[source]
