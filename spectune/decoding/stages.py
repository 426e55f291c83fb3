"""Models that can verify another drafter's tokens: the second stage of a staged draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spectune.decoding.cache import KVStore, Slots, Step, on_device, send
from spectune.decoding.drafter import Drafter, Kept, Row
from spectune.decoding.eagle_drafter import EagleDrafter
from spectune.decoding.exit_drafter import TrimmedDrafter
from spectune.decoding.graphs import Graphs
from spectune.decoding.model_drafter import ModelDrafter
from spectune.errors import UsageError

_MOST_PENDING = 8  # tokens fed to all rows at once; a row that lacks more catches up alone first


class StageModel(Protocol):
    """A model that continues rows whose newest tokens are not verified by the target yet.

    A round of the target goes: `begin`, then `extend` and `rewind` as often as needed, then `keep`. `admit`, `keep` and
    `move` are those of a Drafter.
    """

    taps: tuple[int, ...]
    target_vocab: int
    draft_ids: Tensor | None  # [D] what its logits stand for; None: the first D ids

    @property
    def device(self) -> torch.device: ...

    def record_with(self, graphs: Graphs | None) -> None: ...

    def start(self, rows: int, capacity: int, extension: int) -> None:
        """Make room for `rows` sequences of up to `capacity` tokens and for extensions by up to `extension` tokens."""

    def adopt(self, store: KVStore) -> None:
        """Self-speculation: use the target's cache of this run."""

    def admit(self, index: int, row: Row, states: Tensor | None) -> None: ...

    def room(self, row: Row) -> int:
        """Most tokens that can be put behind a row; may be negative."""

    def begin(self, rows: Sequence[Row]) -> int:
        """Take in what the target has kept since. Returns the forwards this took."""

    def extend(self, rows: Sequence[Row], tokens: Tensor) -> tuple[Tensor, int]:
        """Logits behind the rows and behind each of `tokens` [B, w], and the forwards this took.

        All in one forward. Rows without room ride along; what they get has no meaning.

        Returns:
            [B, w + 1, D]; place i follows the row and the first i tokens.
        """

    def rewind(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        """The rows have grown by the first `accepted` [B] tokens of the last extension and one more each.

        Rows that are complete for this round of the target have grown less, or not at all.
        """

    def keep(self, rows: Sequence[Row], kept: Kept) -> None: ...

    def move(self, source: int, destination: int) -> None: ...


def stage_of(drafter: Drafter) -> StageModel:
    """The model behind a drafter.

    Raises:
        UsageError: it has none that could verify several tokens at once, or it drafts trees.
    """
    if type(drafter) is ModelDrafter or type(drafter) is TrimmedDrafter:
        return ModelStage(drafter)
    if type(drafter) is EagleDrafter:
        return EagleStage(drafter)
    raise UsageError(
        "this drafter cannot be the last stage of a staged draft: it does not verify tokens",
        "put a draft model, the target's own layers or an EAGLE head last, for example staged:ngram>early-exit:20",
    )


class ModelStage:
    """A language model with its own cache, or the target's own layers on the target's.

    Args:
        drafter: names the model and its vocabulary; its own state is not used.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, drafter: ModelDrafter) -> None:
        self.model = drafter.model
        self.width = drafter.shared_vocab  # of the logits that count
        self.target_vocab = drafter.target_vocab
        self.draft_ids = drafter.draft_ids if isinstance(drafter, TrimmedDrafter) else None
        self.shares_target_cache = drafter.shares_target_cache
        self.store = KVStore(0, 0)
        self.context = 0  # positions that a row may fill
        self.cached: list[int] = []  # tokens of each row in the cache
        self.graphs: Graphs | None = None
        self.verified: list[int] = []  # of which the first belong to the target, in a shared cache

    @property
    def device(self) -> torch.device:
        return self.model.device

    def record_with(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def start(self, rows: int, capacity: int, extension: int) -> None:
        self.cached = [0] * rows
        self.verified = [0] * rows
        self.context = min(capacity, self.model.max_context)
        if rows and self.shares_target_cache:
            return
        # Rows that are finished are extended too, behind their last slot that counts.
        room = self.context + extension + 1
        if self.graphs is not None and rows:
            self.store = self.graphs.store(f"stage {id(self)}", rows, room)
        else:
            self.store = KVStore(rows, room)

    def adopt(self, store: KVStore) -> None:
        if self.shares_target_cache:
            self.store = store

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        self.cached[index] = self.verified[index] = row.length - 1 if self.shares_target_cache else 0
        self._catch_up(index, row)

    def room(self, row: Row) -> int:
        # The newest token of n is fed at position n - 1, the last but one of the new tokens at n - 2 + room.
        return self.context - row.length + 1

    def begin(self, rows: Sequence[Row]) -> int:
        return sum(
            self._catch_up(index, row)
            for index, row in enumerate(rows)
            if row.length - self.cached[index] > min(_MOST_PENDING, *(r.length for r in rows))
        )

    def _catch_up(self, index: int, row: Row) -> int:
        """Fill the cache up to the newest token, which the next extension feeds. Returns the forwards this took."""
        start = self.cached[index]
        if not start < row.length - 1 <= self.context:
            return 0
        ids = self._known(torch.tensor([row.tokens[start:-1]], device=self.device))
        self.model.forward(ids, Step(index, (start,), ids.shape[1], self.device), self.store, last_only=True)
        self.cached[index] = row.length - 1
        return 1

    def _known(self, ids: Tensor) -> Tensor:
        """Token ids the model can look up; a padding id only the target has becomes the model's last one."""
        return ids.clamp(max=self.model.vocab_size - 1)

    def extend(self, rows: Sequence[Row], tokens: Tensor) -> tuple[Tensor, int]:
        # Feeding a cached token again rewrites the same values, so all rows can feed equally many. Only what the target
        # has verified must not be touched, since this stage may skip blocks: a row that would go back so far has not
        # grown since and is complete.
        lacking = [row.length - self.cached[index] for index, row in enumerate(rows) if self.room(row) > 0]
        feed = max(lacking, default=1)
        newest = send([row.tokens[-feed:] for row in rows], self.device)
        ids = self._known(torch.cat([newest, tokens], 1))
        last = self.store.capacity - ids.shape[1]
        starts = tuple(
            min(max(row.length - feed, verified), last) for row, verified in zip(rows, self.verified, strict=False)
        )
        logits = self._forward(ids, starts, last_only=tokens.shape[1] == 0)
        for index, row in enumerate(rows):
            # A row beyond the model's context rides along on slots of no meaning.
            if self.room(row) > 0:
                self.cached[index] = row.length + tokens.shape[1]
            else:
                self.cached[index] = min(self.cached[index], last)
        return logits[:, -tokens.shape[1] - 1 :, : self.width], 1

    def _forward(self, ids: Tensor, starts: Slots, *, last_only: bool) -> Tensor:
        """[B, n] at some slots -> logits [B, n or 1, V]."""

        def forward(given: dict[str, Any]) -> dict[str, Any]:
            step = Step(0, given["starts"], ids.shape[1], self.device, reach=self.store.capacity)
            return {"logits": self.model.forward(given["ids"], step, self.store, last_only=last_only)}

        if self.graphs is None:
            return forward({"ids": ids, "starts": starts})["logits"]
        inputs = {"ids": ids, "starts": on_device(starts, self.device)}
        return self.graphs.run(("stage", id(self), last_only), forward, inputs)["logits"]

    def rewind(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        for index, row in enumerate(rows):
            self.cached[index] = min(self.cached[index], row.length - 1)

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        for index, row in enumerate(rows):
            if self.shares_target_cache:
                # The target has filled its cache for all tokens but the newest.
                self.cached[index] = self.verified[index] = row.length - 1
            else:
                self.cached[index] = min(self.cached[index], row.length - 1)

    def move(self, source: int, destination: int) -> None:
        self.cached[destination] = self.cached[source]
        self.verified[destination] = self.verified[source]
        if not self.shares_target_cache:
            self.store.move(source, destination)


class EagleStage:
    """An EAGLE head.

    The head is recurrent: the feature of each drafted token would be the head's output at the token before it. To
    verify several tokens in one forward, all of them get the last feature that is known when the forward starts: the
    output at the row's last token that the head has been fed. So the logits behind the first token of an extension
    are those of the head's own chain, and those behind the others are somewhat less sharp.

    Args:
        drafter: its network, its cache of true pairs and what it does with the target's states are used; slots behind
            the true pairs hold what extensions have fed.
    """

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.target_vocab = drafter.target_vocab
        self.draft_ids = drafter.draft_ids
        self.last = torch.zeros(0)  # [B, h] output at each row's last token that was fed
        self.outputs = torch.zeros(0)  # [B, w + 1, h] of the last extension
        self.lacks_newest = False  # whether the rows' newest tokens are not fed yet

    @property
    def device(self) -> torch.device:
        return self.drafter.network.device

    def record_with(self, graphs: Graphs | None) -> None:
        self.drafter.record_with(graphs)

    def start(self, rows: int, capacity: int, extension: int) -> None:
        self.drafter.start(rows, capacity + extension)

    def adopt(self, store: KVStore) -> None:
        pass

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        self.drafter.admit(index, row, states)

    def room(self, row: Row) -> int:
        return self.drafter.room - row.length + 2

    def begin(self, rows: Sequence[Row]) -> int:
        self.last = self.drafter.feed_pending(rows)
        self.lacks_newest = False
        return 1

    def extend(self, rows: Sequence[Row], tokens: Tensor) -> tuple[Tensor, int]:
        new = tokens
        if self.lacks_newest:
            newest = send([row.tokens[-1:] for row in rows], self.device)
            new = torch.cat([newest, tokens], 1)
        if new.shape[1] == 0:
            self.outputs = self.last[:, None]
            return self.drafter.network.logits(self.outputs), 0
        # Pair i holds token i + 1: the first of the new tokens stands behind a row's first n or n - 1.
        first = 2 if self.lacks_newest else 1
        last = self.drafter.store.capacity - new.shape[1]
        outputs = self._step(new, tuple(min(row.length - first, last) for row in rows))
        self.outputs = outputs if self.lacks_newest else torch.cat([self.last[:, None], outputs], 1)
        return self.drafter.network.logits(self.outputs), 1

    def _step(self, new: Tensor, starts: Slots) -> Tensor:
        """Outputs [B, n, h] at new tokens [B, n], all of which follow the last known feature."""
        network, store = self.drafter.network, self.drafter.store

        def forward(given: dict[str, Any]) -> dict[str, Any]:
            tokens = given["tokens"]
            step = Step(0, given["starts"], tokens.shape[1], self.device, reach=store.capacity)
            features = network.following(given["last"])[:, None].expand(-1, tokens.shape[1], -1)
            return {"outputs": network.step(tokens, features, step, store)}

        graphs = self.drafter.graphs
        if graphs is None:
            return forward({"tokens": new, "last": self.last, "starts": starts})["outputs"]
        inputs = {"tokens": new, "last": self.last, "starts": on_device(starts, self.device)}
        return graphs.run(("eagle stage", id(self)), forward, inputs)["outputs"]

    def rewind(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        self.last = self.outputs[torch.arange(len(rows)), torch.tensor(accepted)]
        self.lacks_newest = True

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        self.drafter.keep(rows, kept)

    def move(self, source: int, destination: int) -> None:
        self.drafter.move(source, destination)
