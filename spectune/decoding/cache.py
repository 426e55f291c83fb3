"""The key-value cache: preallocated per layer, one length per row.

Rows grow by different amounts each round, so every row has its own length. Rejected tokens cost nothing: the length
moves back and the next write lands on the same slots before anything can attend to them. A slot's index is the
token's position, except in a tree that is being verified: its nodes lie side by side behind the text, and the accepted
path is moved together afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tail:
    """The last slots of each row, where they hold a tree and not a line of text.

    Row b's slots below `base[b]` hold text and are seen by every query. Slot `base[b] + t` holds a tree node at
    position `base[b] + depths[b, t]`; T counts the tree slots written so far, this step's included.
    """

    base: tuple[int, ...]
    depths: Tensor  # [B, T] int64
    visible: Tensor  # [B, q, T] bool: which of them each query sees, its own included


@dataclass(slots=True)
class Step:
    """Where the queries of one forward stand.

    Row b's queries occupy slots `starts[b] … starts[b] + query - 1`. Without a tail a slot's index is its token's
    position, and a query sees its own slot and all before it.
    """

    first_row: int
    starts: tuple[int, ...]
    query: int
    device: torch.device
    tail: Tail | None = None
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _slots: Tensor | None = None
    _positions: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.starts))

    @property
    def length(self) -> int:
        """Slots that the longest row can see."""
        return max(self.starts) + self.query

    @property
    def slots(self) -> Tensor:
        """[B, q] slot of each query."""
        if self._slots is None:
            starts = torch.tensor(self.starts, device=self.device)
            self._slots = starts[:, None] + torch.arange(self.query, device=self.device)
        return self._slots

    @property
    def positions(self) -> Tensor:
        """[B, q] position of each query's token."""
        if self.tail is None:
            return self.slots
        if self._positions is None:
            base = torch.tensor(self.tail.base, device=self.device)[:, None]
            self._positions = base + self.tail.depths.gather(1, self.slots - base)
        return self._positions

    def mask(self, window: int | None, groups: int = 1) -> Tensor | None:
        """[B, 1, groups * q, length] bool, True where a query may look; None where every slot is visible.

        Args:
            window: reach of a sliding-window layer, the query's own place included.
            groups: how often the q places are repeated, one group after the other.
        """
        alone = len(self.starts) == 1 and self.query == 1 and self.tail is None
        if alone and (window is None or self.length <= window):
            return None
        if (window, groups) not in self._masks:
            mask = self._chain_mask(window) if self.tail is None else self._tree_mask(self.tail, window)
            self._masks[window, groups] = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
        return self._masks[window, groups]

    def _chain_mask(self, window: int | None) -> Tensor:
        slot = torch.arange(self.length, device=self.device)
        own = self.slots[:, None, :, None]
        visible = slot <= own
        return visible if window is None else visible & (slot > own - window)

    def _tree_mask(self, tail: Tail, window: int | None) -> Tensor:
        """Text is visible as a whole, of the tree what `tail.visible` says."""
        base = torch.tensor(tail.base, device=self.device)[:, None]  # [B, 1]
        slot = torch.arange(self.length, device=self.device)
        place = slot - base  # [B, length] index into the tail, negative in the text
        inside = place.clamp(0, tail.depths.shape[1] - 1)
        in_tree = tail.visible.gather(2, inside[:, None].expand(-1, self.query, -1))  # [B, q, length]
        in_tree = in_tree & (place < tail.depths.shape[1])[:, None]
        visible = torch.where((place < 0)[:, None], True, in_tree)[:, None]
        if window is None:
            return visible
        position = torch.where(place < 0, slot, base + tail.depths.gather(1, inside))  # [B, length]
        return visible & (position[:, None, None] > self.positions[:, None, :, None] - window)

    @property
    def is_fresh_prefill(self) -> bool:
        """One row from slot 0: plain causal attention, no mask needed."""
        return self.starts == (0,) and self.query > 1 and self.tail is None


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
                stored[rows, :, step.slots] = new.transpose(1, 2)
        return keys[:, :, : step.length], values[:, :, : step.length]

    def _buffer(self, like: Tensor) -> Tensor:
        # Zeros, not empty: masked slots still enter the products, and 0 · NaN is NaN.
        return torch.zeros(self.rows, like.shape[1], self.capacity, like.shape[3], dtype=like.dtype, device=like.device)

    def move(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[destination] = buffer[source]

    def compact(self, starts: Sequence[int], path: Tensor, accepted: Sequence[int]) -> None:
        """Move each row's accepted path to consecutive slots behind its root.

        Positions were taken from depths, so the keys need no new rotation.

        Args:
            starts: [B] slot of each row's root.
            path: [B, D + 1] node numbers on the path (root 0), padded.
            accepted: [B] how many nodes behind the root are kept.
        """
        depth = max(accepted, default=0)
        if depth == 0:
            return
        places = torch.arange(1, depth + 1, device=path.device)
        nodes = path[:, 1 : depth + 1]
        # Behind a row's own path the slots hold nothing that is ever read again; they may be copied onto themselves.
        kept = places <= torch.tensor(accepted, device=path.device)[:, None]
        nodes = torch.where(kept, nodes, places)
        if torch.equal(nodes, places.expand_as(nodes)):
            return
        base = torch.tensor(starts, device=path.device)[:, None]
        rows = torch.arange(len(starts), device=path.device)[:, None]
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                # Read into a copy first: source and destination may overlap.
                buffer[rows, :, base + places] = buffer[rows, :, base + nodes]

    def bytes_per_token(self) -> int:
        """Bytes one token of one row takes over all layers written so far."""
        buffers = (*self.keys.values(), *self.values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)
