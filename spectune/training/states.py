"""The target's hidden states along texts, computed once and kept on disk for all trainings of that target.

There is one file per tap (a layer boundary that a method reads) and an index that names the texts in it. States are
appended, then the index is replaced: what the index does not name is overwritten later, so a kill costs the texts
since the last index. Texts are keyed by their token ids, so a longer corpus only adds to what a shorter one left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.errors import SpectuneError
from spectune.sweeping.atomic import cannot_write, write_atomically
from spectune.training.text import Text

_BYTES = 2  # states are kept in bfloat16, whatever the target computes in
_INDEX_SECONDS = 20.0
_FORWARD_TOKENS = {"cpu": 1024, "cuda": 32_768}
_WINDOW = 256  # texts among which ones of similar length are sought


@dataclass(frozen=True, slots=True)
class StateProgress:
    """Texts done of those that lacked states when the work began."""

    texts: int
    wanted: int
    tokens: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        return self.seconds / self.texts * (self.wanted - self.texts) if self.texts else None


@dataclass(slots=True)
class _Tap:
    """States of one tap: a file of rows of `width` bfloat16 numbers, and where each text's rows lie in it."""

    path: Path
    width: int
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # first row, count
    pending: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, number: int, width: int) -> _Tap:
        tap = cls(folder / f"tap-{number}.bin", width)
        try:
            named = json.loads(tap.index.read_text("utf-8"))
            size = tap.path.stat().st_size
        except (OSError, ValueError):
            return tap  # nothing there, or nothing that can be trusted: it is computed again
        tap.rows = {
            key: (first, count) for key, (first, count) in named.items() if (first + count) * width * _BYTES <= size
        }
        return tap

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".json")

    def add(self, key: str, states: Tensor) -> None:
        """Keep a text's states [n, width] in memory until `flush`."""
        if key not in self.rows:
            self.pending[key] = states.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().tobytes()

    def flush(self) -> None:
        """Append what is pending and name it in the index."""
        if not self.pending:
            return
        end = max((first + count for first, count in self.rows.values()), default=0)
        try:
            with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
                file.seek(end * self.width * _BYTES)
                for key, data in self.pending.items():
                    file.write(data)
                    count = len(data) // (self.width * _BYTES)
                    self.rows[key] = (end, count)
                    end += count
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.pending = {}
        write_atomically(self.index, json.dumps(self.rows, separators=(",", ":")))


class StateStore:
    """States of one target, for some taps.

    Args:
        folder: of this target in the cache.
        taps: ascending; i is the input of layer i, the number of layers what stands behind the final norm.
        hidden_size: h of the target.
    """

    def __init__(self, folder: Path, taps: Sequence[int], hidden_size: int) -> None:
        self.folder = folder
        self.numbers = tuple(taps)
        self.hidden_size = hidden_size
        self._reopen()

    def _reopen(self) -> None:
        self.taps = [_Tap.open(self.folder, number, self.hidden_size) for number in self.numbers]
        self.maps: dict[int, np.memmap[tuple[int, int], np.dtype[np.int16]]] = {}

    def complete(
        self,
        target: CausalModel,
        texts: Sequence[Text],
        on_progress: Callable[[StateProgress], None] | None = None,
    ) -> None:
        """Run the target over the texts that lack states. Interrupted by KeyboardInterrupt, what is done is kept.

        Waits while another process computes states of this target.

        Raises:
            SpectuneError: the disk is full, or too small.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            self._reopen()
            missing = [text for text in texts if any(text.key not in tap.rows for tap in self.taps)]
            self._check_room(missing)
            began = saved = time.monotonic()
            done = tokens = 0
            try:
                for group in _groups(missing, _FORWARD_TOKENS.get(target.device.type, 1024)):
                    self._compute(target, group)
                    done, tokens = done + len(group), tokens + sum(len(text.ids) for text in group)
                    now = time.monotonic()
                    if now - saved > _INDEX_SECONDS:
                        self._flush()
                        saved = now
                    if on_progress:
                        on_progress(StateProgress(done, len(missing), tokens, now - began))
            finally:
                self._flush()

    def _check_room(self, missing: Sequence[Text]) -> None:
        needed = sum(len(t.ids) for t in missing for tap in self.taps if t.key not in tap.rows)
        needed *= self.hidden_size * _BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SpectuneError(
                f"the target's states take {needed / 1e9:.1f} GB, {self.folder} has room for {free / 1e9:.1f} GB",
                "give fewer --tokens, or set SPECTUNE_CACHE to a larger disk",
            )

    @torch.inference_mode()
    def _compute(self, target: CausalModel, group: Sequence[Text]) -> None:
        ids = pad([torch.tensor(text.ids) for text in group]).to(target.device)
        step = Step(0, (0,) * len(group), ids.shape[1], target.device)
        # Texts are padded behind their ends, where causal attention does not look.
        store = KVStore(len(group), ids.shape[1])
        _, states = target.forward_with_states(ids, step, store, self.numbers, last_only=True)
        for row, text in enumerate(group):
            for tap, part in zip(self.taps, states[row, : len(text.ids)].split(self.hidden_size, -1), strict=True):
                tap.add(text.key, part)

    def _flush(self) -> None:
        for tap in self.taps:
            tap.flush()
        self.maps = {}

    def read(self, text: Text) -> Tensor:
        """[n, taps * h] states of a text, in bfloat16. Raises KeyError where there are none."""
        parts = []
        for place, tap in enumerate(self.taps):
            first, count = tap.rows[text.key]
            if place not in self.maps:
                rows = tap.path.stat().st_size // (tap.width * _BYTES)
                self.maps[place] = np.memmap(tap.path, np.int16, "r", shape=(rows, tap.width))
            parts.append(torch.from_numpy(np.array(self.maps[place][first : first + count])).view(torch.bfloat16))
        return torch.cat(parts, -1)


def _groups(texts: Sequence[Text], tokens: int) -> Iterator[list[Text]]:
    """Texts of similar length together, up to so many tokens with padding."""
    for start in range(0, len(texts), _WINDOW):
        group: list[Text] = []
        for text in sorted(texts[start : start + _WINDOW], key=lambda text: len(text.ids)):
            if group and (len(group) + 1) * len(text.ids) > tokens:
                yield group
                group = []
            group.append(text)
        yield group


def pad(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows [n_b, ...] of different length, zeros behind their ends. -> [B, T, ...]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
