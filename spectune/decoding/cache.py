"""The key-value cache: preallocated per layer, one length per row.

Rows grow by different amounts each round, so every row has its own length. Rejected tokens cost nothing: the length
moves back and the next write lands on the same slots before anything can attend to them. A slot's index is the
token's position, except in a tree that is being verified: its nodes lie side by side behind the text, and the accepted
path is moved together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# A slot per row: numbers that the host knows, or [B] int64 that only the device does (see `Step`).
Slots = tuple[int, ...] | Tensor


@dataclass(frozen=True, slots=True)
class Tail:
    """The last slots of each row, where they hold a tree and not a line of text.

    Row b's slots below `base[b]` hold text and are seen by every query. Slot `base[b] + t` holds a tree node at
    position `base[b] + depths[b, t]`; T counts the tree slots written so far, this step's included.
    """

    base: Slots
    depths: Tensor  # [B, T] int64
    visible: Tensor  # [B, q, T] bool: which of them each query sees, its own included


@dataclass(slots=True)
class Step:
    """Where the queries of one forward stand.

    Row b's queries occupy slots `starts[b] … starts[b] + query - 1`. Without a tail a slot's index is its token's
    position, and a query sees its own slot and all before it.

    Where `starts` are on the device only, nothing of the step's shape depends on them: queries look at the first
    `reach` slots through a mask. Such a step can be recorded once and run again from other places.
    """

    first_row: int
    starts: Slots
    query: int
    device: torch.device
    tail: Tail | None = None
    reach: int = 0
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _slots: Tensor | None = None
    _positions: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.starts))

    @property
    def only_start(self) -> int | None:
        """Where the queries of a single row start, if the host knows."""
        return self.starts[0] if isinstance(self.starts, tuple) and len(self.starts) == 1 else None

    @property
    def length(self) -> int:
        """Slots that the longest row can see, or more."""
        return max(self.starts) + self.query if isinstance(self.starts, tuple) else self.reach

    @property
    def slots(self) -> Tensor:
        """[B, q] slot of each query."""
        if self._slots is None:
            starts = on_device(self.starts, self.device)
            self._slots = starts[:, None] + torch.arange(self.query, device=self.device)
        return self._slots

    @property
    def positions(self) -> Tensor:
        """[B, q] position of each query's token."""
        if self.tail is None:
            return self.slots
        if self._positions is None:
            base = on_device(self.tail.base, self.device)[:, None]
            self._positions = base + self.tail.depths.gather(1, self.slots - base)
        return self._positions

    def mask(self, window: int | None, groups: int = 1) -> Tensor | None:
        """[B, 1, groups * q, length] bool, True where a query may look; None where every slot is visible.

        Args:
            window: reach of a sliding-window layer, the query's own place included.
            groups: how often the q places are repeated, one group after the other.
        """
        alone = self.only_start is not None and self.query == 1 and self.tail is None
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
        base = on_device(tail.base, self.device)[:, None]  # [B, 1]
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
        return self.only_start == 0 and self.query > 1 and self.tail is None


def send(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Whole numbers of the host on a device, without waiting for the work that is queued there."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def on_device(slots: Slots, device: torch.device) -> Tensor:
    """[B] int64."""
    return send(slots, device) if isinstance(slots, tuple) else slots


def advance(starts: Slots, by: int, last: int) -> Slots:
    """Every start moved on, but never behind slot `last`."""
    if isinstance(starts, tuple):
        return tuple(min(start + by, last) for start in starts)
    return (starts + by).clamp(max=last)


class KVStore:
    """Keys and values of `rows` sequences, [rows, kv_heads, capacity, head_dim] per layer.

    Buffers are made on a layer's first write, since only then its head count and sizes are known.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.compaction: Callable[[Tensor, Tensor, Tensor], None] | None = None  # in the place of plain torch
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
            if step.only_start is not None:
                stored[:, :, step.only_start : step.length] = new
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

    def copy(self, source: KVStore, row: int, destination: int, length: int) -> None:
        """Copy the first slots of another store's row into a row of this one."""
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer, buffer in theirs.items():
                if layer not in mine:
                    mine[layer] = self._buffer(buffer)
                mine[layer][destination, :, :length] = buffer[row, :, :length]

    def compact(self, starts: Sequence[int], path: Tensor, accepted: Sequence[int]) -> None:
        """Move each row's accepted path to consecutive slots behind its root, where anything has to move.

        Positions were taken from depths, so the keys need no new rotation.

        Args:
            starts: [B] slot of each row's root.
            path: [B, D + 1] node numbers on the path (root 0), padded.
            accepted: [B] how many nodes behind the root are kept.
        """
        depth = max(accepted, default=0)
        if depth == 0:
            return
        places, nodes = _moves(path[:, : depth + 1], torch.tensor(accepted, device=path.device))
        if not torch.equal(nodes, places.expand_as(nodes)):
            self._compact(torch.tensor(starts, device=path.device), places, nodes)

    def compact_all(self, starts: Tensor, path: Tensor, accepted: Tensor) -> None:
        """As `compact`, unconditionally and with nothing read back from the device. starts, accepted: [B]."""
        if self.compaction is not None:
            self.compaction(starts, path, accepted)
        else:
            self._compact(starts, *_moves(path, accepted))

    def _compact(self, starts: Tensor, places: Tensor, nodes: Tensor) -> None:
        """starts [B]; places [D] and nodes [B, D] as from `_moves`."""
        base = starts[:, None]
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                # Read into a copy first: source and destination may overlap.
                buffer[rows, :, base + places] = buffer[rows, :, base + nodes]

    def bytes_per_token(self) -> int:
        """Bytes one token of one row takes over all layers written so far."""
        buffers = (*self.keys.values(), *self.values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)


def _moves(path: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Places behind the root [D], and the node [B, D] whose keys belong there.

    Behind a row's own path the slots hold nothing that is ever read again; they may be copied onto themselves.
    """
    places = torch.arange(1, path.shape[1], device=path.device)
    return places, torch.where(places <= accepted[:, None], path[:, 1:], places)
