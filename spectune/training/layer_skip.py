"""Search for the blocks that a target can leave out when it drafts for itself (Zhang et al. 2023, arXiv 2309.08168).

A decoder layer is an attention and an MLP block, so 2 L flags decide a draft, and what counts is the measured speed
of decoding. The authors search with Bayesian optimisation; here one look at every block gives the order in which
blocks are worth trying, and a local search spends the rest of the time:

    1. rank     leave out one block at a time; how often is the next token still the target's?
    2. sweep    leave out the n best ranked blocks, for growing n; measure tokens per second
    3. improve  from the fastest set on, add, drop or swap a block; keep what is faster twice

The draft reads the target's verified keys and values, so a skipped set costs no memory and no weights.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.layer_skip import Skip, skipped_model
from spectune.decoding.lean import LeanModel
from spectune.decoding.loading import Loaded, weight_bytes_per_step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.errors import UsageError
from spectune.sweeping.atomic import write_atomically
from spectune.training.text import Text

_RANKED_TOKENS = 256  # of text, on which single blocks are judged
_PROMPTS = 4
_OUTPUT = 40  # tokens decoded per prompt and measurement
_LARGEST_K = 8
_KNOWN_IN_A_ROW = 100  # then the surroundings of the fastest set count as searched


@dataclass(frozen=True, slots=True)
class Measured:
    """A set of skipped blocks as it decodes; `speedup` over plain decoding measured beside it."""

    blocks: tuple[str, ...]  # a3 and m3 are layer 3's attention and MLP, 3 is the whole layer
    k: int
    tokens_per_second: float
    speedup: float
    acceptance: float  # accepted of drafted tokens

    @property
    def skip(self) -> Skip:
        return _skip(self.blocks)


@dataclass(slots=True)
class Found:
    """All that a search knows; kept in a file, so that it can go on after a kill."""

    ranking: dict[str, float] = field(default_factory=dict)  # block -> share of tokens unchanged without it
    measured: list[Measured] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> Measured | None:
        return max(self.measured, key=lambda m: m.speedup, default=None)

    @classmethod
    def read(cls, path: Path) -> Found:
        if not path.exists():
            return cls()
        try:
            data: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return cls(
                data["ranking"],
                [Measured(**entry | {"blocks": tuple(entry["blocks"])}) for entry in data["measured"]],
                data["seconds"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"cannot read {path}", "remove it to start afresh") from error

    def write(self, path: Path) -> None:
        content = {
            "ranking": self.ranking,
            "measured": [asdict(m) for m in self.measured],
            "seconds": self.seconds,
        }
        write_atomically(path, json.dumps(content) + "\n")


class LayerSkipSearch:
    """One search.

    Args:
        texts: what the target writes; some to rank blocks on, the prompts of others to decode.
        minutes: time for the whole search, over all sessions.
        path: file of what is known.
        on_progress: called with the part of the time that is over and what was last found.
    """

    def __init__(
        self,
        target: Loaded,
        texts: Sequence[Text],
        *,
        minutes: float,
        seed: int,
        path: Path,
        on_progress: Callable[[float, str], None],
    ) -> None:
        self.target = target
        self.texts = texts
        self.seconds = minutes * 60
        self.path = path
        self.on_progress = on_progress
        self.rng = random.Random(seed)
        self.found = Found.read(path)
        self.before = self.found.seconds
        self.began = time.monotonic()
        self.requests = [
            Request(str(i), text.ids[: text.prompt], _OUTPUT, i) for i, text in enumerate(_spread(texts, _PROMPTS))
        ]

    def run(self) -> Found:
        """Search until the time is over; everything found is in the file at any time."""
        self._rank()
        order = sorted(self.found.ranking, key=lambda block: -self.found.ranking[block])
        for count in _counts(len(order)):
            if self._time_left() <= 0 and self.found.measured:
                break
            self._measure(order[:count])
        known = 0  # neighbours in a row that were measured before
        while self._time_left() > 0 and known < _KNOWN_IN_A_ROW and self.found.best is not None:
            before = len(self.found.measured)
            self._measure(self._neighbour(self.found.best.blocks, order))
            known = 0 if len(self.found.measured) > before else known + 1
        return self.found

    def _time_left(self) -> float:
        self.found.seconds = self.before + time.monotonic() - self.began
        return self.seconds - self.found.seconds

    def _keep(self, said: str) -> None:
        left = self._time_left()
        self.found.write(self.path)
        self.on_progress(min(1.0, 1 - left / self.seconds), said)

    @torch.inference_mode()
    def _rank(self) -> None:
        """How often the next token stays the target's when one block is left out."""
        texts, count = [], 0
        for text in self.texts:
            texts.append(text)
            count += len(text.ids)
            if count >= _RANKED_TOKENS:
                break
        choices = [_choices(self.target.model, text) for text in texts]
        total = sum(len(c) for c in choices)
        for block in self._all_blocks():
            if block not in self.found.ranking:
                model = skipped_model(self.target.model, _skip([block]))
                same = sum(int((_choices(model, t) == c).sum()) for t, c in zip(texts, choices, strict=True))
                self.found.ranking[block] = same / total
                self._keep(f"without {block}: {100 * same / total:.0f} % of tokens unchanged")

    def _all_blocks(self) -> list[str]:
        """`a3` and `m3` are blocks; where only whole layers can be skipped, `3` is layer 3."""
        layers = range(self.target.model.layers_count)
        if not isinstance(self.target.model, LeanModel):
            return [str(i) for i in layers]
        return [f"{kind}{i}" for i in layers for kind in "am"]

    def _measure(self, blocks: Iterable[str]) -> None:
        """Decode with these blocks left out, beside plain decoding; a seeming record is measured once more."""
        names = tuple(sorted(blocks))
        if any(m.blocks == names for m in self.found.measured) or not _leaves_something(names, self.target.model):
            return
        best = self.found.best
        result = self._decode(names)
        if best is not None and result.speedup > best.speedup:
            result = min(result, self._decode(names), key=lambda m: m.speedup)
        self.found.measured.append(result)
        record = max(result.speedup, best.speedup if best else 0.0)
        self._keep(f"{len(names)} blocks {result.speedup:.2f}x; fastest so far {record:.2f}x")

    def _decode(self, blocks: tuple[str, ...]) -> Measured:
        model = skipped_model(self.target.model, _skip(blocks))
        share = weight_bytes_per_step(model.model) / weight_bytes_per_step(self.target.model.model)
        # A guess at the acceptance: the product of the single blocks'.
        k = best_k(math.prod(self.found.ranking[block] for block in blocks), share)
        vocab = self.target.model.vocab_size
        drafter = ModelDrafter(model, shared_vocab=vocab, target_vocab=vocab, shares_target_cache=True)
        plain, _ = self._speed(None, 0)
        speed, acceptance = self._speed(drafter, k)
        return Measured(blocks, k, speed, speed / plain, acceptance)

    def _speed(self, drafter: ModelDrafter | None, k: int) -> tuple[float, float]:
        """Tokens per second behind the first, and accepted of drafted tokens."""
        # Behind stop tokens too, so that all measurements decode equally much.
        decoder = Decoder(self.target.model, drafter, DecodeSettings(KSchedule.constant(k)), StopRule())
        generations = decoder.decode(self.requests, 1).generations
        tokens = sum(len(g.tokens) - 1 for g in generations)
        rounds = [r for g in generations for r in g.rounds]
        drafted = sum(r.drafted for r in rounds)
        seconds = sum(g.decode_seconds for g in generations)
        return tokens / max(seconds, 1e-9), sum(r.accepted for r in rounds) / max(1, drafted)

    def _neighbour(self, blocks: Sequence[str], order: Sequence[str]) -> set[str]:
        """Add a well ranked block, drop one, or both."""
        moved = set(blocks)
        outside = [block for block in order if block not in moved]
        kind = self.rng.choice(("add", "drop", "swap"))
        if kind != "add" and len(blocks) > 1:
            moved.discard(self.rng.choice(blocks))
        if kind != "drop" and outside:
            # The best ranked are tried most: more than half of the choices fall on the first four.
            moved.add(outside[min(len(outside) - 1, int(self.rng.expovariate(0.25)))])
        return moved


def best_k(acceptance: float, cost: float) -> int:
    """Tokens to draft for which decoding is fastest, if a draft step costs `cost` of a verification."""
    alpha = min(acceptance, 0.999)
    return max(range(1, _LARGEST_K + 1), key=lambda k: (1 - alpha ** (k + 1)) / (1 - alpha) / (1 + k * cost))


@torch.inference_mode()
def _choices(model: CausalModel, text: Text) -> torch.Tensor:
    """The model's choices behind every token of a text. [n]"""
    ids = torch.tensor([text.ids], device=model.device)
    step = Step(0, (0,), ids.shape[1], model.device)
    return model.forward(ids, step, KVStore(1, ids.shape[1]))[0].argmax(-1)


def _counts(blocks: int) -> list[int]:
    """Sizes of the sets that are measured first: 1, 2, 3, 4, 6, 8, 12, 16, … up to most of the blocks."""
    counts = [1, 2, 3]
    while counts[-1] < 0.8 * blocks:
        counts.append(max(counts[-1] + 1, round(counts[-1] * 1.4)))
    return [count for count in counts if count < blocks]


def _skip(blocks: Iterable[str]) -> Skip:
    names = list(blocks)
    return Skip(
        attention=frozenset(int(name.lstrip("a")) for name in names if not name.startswith("m")),
        mlp=frozenset(int(name.lstrip("m")) for name in names if not name.startswith("a")),
    )


def _leaves_something(blocks: Sequence[str], model: CausalModel) -> bool:
    return bool(blocks) and len(_skip(blocks).layers) < model.layers_count


def _spread(texts: Sequence[Text], count: int) -> list[Text]:
    """`count` texts from all over the list, or as many as there are."""
    step = max(1, len(texts) // count)
    return list(texts[::step][:count])
