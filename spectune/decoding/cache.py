"""The key-value cache: preallocated per layer, one length per row.

Rows grow by different amounts each round, so every row has its own length. Rejected tokens cost nothing: the length
moves back and the next write lands on the same slots before anything can attend to them. A slot's index is the
token's position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Step:
    """Where the queries of one forward stand.

    Row b's queries occupy slots `starts[b] … starts[b] + query - 1` and see their own slot and all before it.
    """

    first_row: int
    starts: tuple[int, ...]
    query: int
    device: torch.device
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _positions: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.starts))

    @property
    def length(self) -> int:
        """Slots that the longest row can see."""
        return max(self.starts) + self.query

    @property
    def positions(self) -> Tensor:
        """[B, q] slot of each query."""
        if self._positions is None:
            starts = torch.tensor(self.starts, device=self.device)
            self._positions = starts[:, None] + torch.arange(self.query, device=self.device)
        return self._positions

    def mask(self, window: int | None) -> Tensor | None:
        """[B, 1, q, length] bool, True where a query may look; None where every slot is visible.

        `window` is the reach of a sliding-window layer, the query's own slot included.
        """
        alone = len(self.starts) == 1 and self.query == 1
        if alone and (window is None or self.length <= window):
            return None
        if window not in self._masks:
            slot = torch.arange(self.length, device=self.device)
            own = self.positions[:, None, :, None]
            visible = slot <= own
            if window is not None:
                visible = visible & (slot > own - window)
            self._masks[window] = visible
        return self._masks[window]

    @property
    def is_fresh_prefill(self) -> bool:
        """One row from slot 0: plain causal attention, no mask needed."""
        return self.starts == (0,) and self.query > 1


class KVStore:
    """Keys and values of `rows` sequences, [rows, kv_heads, capacity, head_dim] per layer.

    Buffers are made on a layer's first write, since only then its head count and sizes are known.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Store a step's keys and values; return what its queries may attend to.

        Args:
            key, value: [B, kv_heads, q, head_dim].

        Returns:
            keys, values: [B, kv_heads, step.length, head_dim] views.
        """
        if layer not in self.keys:
            self.keys[layer] = self._buffer(key)
            self.values[layer] = self._buffer(value)
        keys, values = self.keys[layer][step.rows], self.values[layer][step.rows]
        for stored, new in ((keys, key), (values, value)):
            if len(step.starts) == 1:
                stored[:, :, step.starts[0] : step.length] = new
            else:
                rows = torch.arange(len(step.starts), device=new.device)[:, None]
                stored[rows, :, step.positions] = new.transpose(1, 2)
        return keys[:, :, : step.length], values[:, :, : step.length]

    def _buffer(self, like: Tensor) -> Tensor:
        # Zeros, not empty: masked slots still enter the products, and 0 · NaN is NaN.
        return torch.zeros(self.rows, like.shape[1], self.capacity, like.shape[3], dtype=like.dtype, device=like.device)

    def move(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[destination] = buffer[source]

    def bytes_per_token(self) -> int:
        """Bytes one token of one row takes over all layers written so far."""
        buffers = (*self.keys.values(), *self.values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)
