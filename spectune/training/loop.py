"""The training loop of every method: optimizer, schedule, checkpoints that continue exactly, and the held-out curve.

A run is a pure function of its data, its settings and its seed: which rows make up batch i of epoch e depends on the
seed alone, and a checkpoint holds the weights, the optimizer, the place in the data, the random state and the
curves. A run that was killed and resumed therefore ends with the same weights as one that was not, unless a time
budget shapes its schedule.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from spectune.errors import UsageError
from spectune.sweeping.atomic import cannot_write

# Fractions of a run at which the held-out text is looked at: most is learnt early.
CURVE = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


class Batch(NamedTuple):
    """Rows of one batch, padded behind their ends.

    progress: how much of the training is over, 0 … 1; for losses that change on the way.
    """

    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True where the target wrote the token
    states: Tensor | None = None  # [B, T, taps * h] the target's states, in the cache's type
    progress: float = 0.0


class HeldOut(NamedTuple):
    """Figures on held-out text, per place of a draft.

    acceptance: how often greedy decoding keeps the drafted token, given that it kept all before.
    overlap: mean 1 - TV(p, q), the chance that speculative sampling at temperature 1 keeps it.
    """

    acceptance: list[float]
    overlap: list[float]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round of greedy decoding that these acceptances promise, the target's own token included."""
        length, reached = 1.0, 1.0
        for share in self.acceptance:
            reached *= share
            length += reached
        return length


class Method(Protocol):
    """What is trained, and how it is judged."""

    taps: tuple[int, ...]
    learning_rate: float

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: Batch) -> Tensor: ...

    def evaluate(self, batches: Iterable[Batch]) -> HeldOut: ...


class Data(Protocol):
    """Text in batches."""

    def plan(self, epoch: int) -> Sequence[Sequence[int]]:
        """The batches of an epoch, as numbers of rows; a function of the epoch alone."""

    def batch(self, rows: Sequence[int], *, progress: float = 0.0) -> Batch: ...

    def held_out(self, tokens: int | None = None) -> Iterable[Batch]:
        """Batches that are never trained on, up to about so many tokens."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How to train.

    minutes: a budget of training time; the schedule then ends with it, if it comes before the last epoch.
    autocast: multiply in bfloat16; the weights stay in float32.
    """

    learning_rate: float
    epochs: int
    seed: int = 0
    minutes: float | None = None
    autocast: bool = False
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.01
    curve_tokens: int = 8_000  # of held-out text for the points of the curve; its end takes all of it
    checkpoint_seconds: float = 60.0


@dataclass(slots=True)
class Curves:
    """What a run has seen and shown so far."""

    tokens: int = 0  # answer tokens trained on, repeats included
    seconds: float = 0.0  # of training, over all sessions
    losses: list[tuple[int, float]] = field(default_factory=list)  # tokens seen, mean loss since the entry before
    held_out: list[tuple[int, list[float], list[float]]] = field(default_factory=list)  # tokens seen, the figures


@dataclass(frozen=True, slots=True)
class Report:
    """Where the loop is, for people."""

    progress: float
    tokens: int
    loss: float
    seconds: float
    seconds_left: float | None
    held_out: HeldOut | None = None


class Stopped(Exception):
    """The loop was asked to stop; the checkpoint holds all that was done."""


@dataclass(slots=True)
class _State:
    """The place in the run; `fraction` is the part of all batches that is done."""

    epoch: int = 0
    step: int = 0  # in the epoch
    fraction: float = 0.0


class Loop:
    """One run of training.

    Args:
        checkpoint: file to continue from, and to keep up to date.
        fingerprint: of data and method; a checkpoint of another run is refused.
        on_report: called after steps, a few times a second at most.
        should_stop: asked after every step.
    """

    def __init__(
        self,
        method: Method,
        data: Data,
        settings: LoopSettings,
        checkpoint: Path,
        fingerprint: str,
        *,
        on_report: Callable[[Report], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.method = method
        self.data = data
        self.settings = settings
        self.checkpoint = checkpoint
        self.fingerprint = fingerprint
        self.on_report = on_report
        self.should_stop = should_stop
        self.parameters = [p for p in method.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            _decayed(self.parameters, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        self.state = _State()
        self.curves = Curves()
        self._pending: list[float] = []  # losses since the last entry of the curve
        self._saved = self._reported = time.monotonic()

    def run(self) -> HeldOut:
        """Train to the end, from the checkpoint if there is one; the figures on all of the held-out text.

        Raises:
            UsageError: a checkpoint of another run, or a loss that is no number.
            Stopped: `should_stop` said so; the checkpoint is up to date.
        """
        torch.manual_seed(self.settings.seed)
        if self.checkpoint.exists():
            self._load()
        while self.state.epoch < self.settings.epochs and self._progress() < 1.0:
            plan = self.data.plan(self.state.epoch)
            while self.state.step < len(plan) and self._progress() < 1.0:
                self._train_on(plan)
            if self.state.step >= len(plan):
                self.state.epoch, self.state.step = self.state.epoch + 1, 0
        self._keep_losses()
        found = self._evaluate(None)
        self.curves.held_out.append((self.curves.tokens, *found))
        self._report(found)
        self.save()
        return found

    def _train_on(self, plan: Sequence[Sequence[int]]) -> None:
        began = time.monotonic()
        progress = self._progress()
        batch = self.data.batch(plan[self.state.step], progress=progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(progress, self.settings.warmup)
        loss = self._backward(batch)
        nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        self.curves.tokens += int(batch.mask.sum())
        self._pending.append(loss)
        self.state.step += 1
        self.state.fraction = (self.state.epoch + self.state.step / len(plan)) / self.settings.epochs
        self.curves.seconds += time.monotonic() - began
        if len(self._pending) >= _losses_per_entry(len(plan) * self.settings.epochs):
            self._keep_losses()
        after = self._progress()
        if any(progress < point <= after for point in CURVE):
            found = self._evaluate(self.settings.curve_tokens)
            self.curves.held_out.append((self.curves.tokens, *found))
            self._report(found)
        elif time.monotonic() - self._reported > 0.2:
            self._report()
        if time.monotonic() - self._saved > self.settings.checkpoint_seconds:
            self.save()
        if self.should_stop():
            self.save()
            raise Stopped

    def _backward(self, batch: Batch) -> float:
        self.method.module.train()
        device = batch.ids.device.type
        with torch.autocast(device, torch.bfloat16) if self.settings.autocast else nullcontext():
            loss = self.method.loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UsageError(f"the loss is {value} after {self.curves.tokens} tokens", "use a smaller --learning-rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return value

    def _evaluate(self, tokens: int | None) -> HeldOut:
        self.method.module.eval()
        return self.method.evaluate(self.data.held_out(tokens))

    def _progress(self) -> float:
        """How much of the run is over: of its batches, or of its time if that ends first."""
        if self.settings.minutes is None:
            return self.state.fraction
        return min(1.0, max(self.state.fraction, self.curves.seconds / 60 / self.settings.minutes))

    def _keep_losses(self) -> None:
        if self._pending:
            self.curves.losses.append((self.curves.tokens, sum(self._pending) / len(self._pending)))
            self._pending = []

    def _report(self, found: HeldOut | None = None) -> None:
        self._reported = time.monotonic()
        if self.on_report is None:
            return
        progress, seconds = self._progress(), self.curves.seconds
        loss = self._pending[-1] if self._pending else self.curves.losses[-1][1] if self.curves.losses else math.nan
        left = seconds / progress * (1 - progress) if progress > 0 else None
        self.on_report(Report(progress, self.curves.tokens, loss, seconds, left, found))

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        content = {
            "fingerprint": self.fingerprint,
            "parameters": [p.detach() for p in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
            "curves": asdict(self.curves),
            "pending": self._pending,
            "random": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            content["random_cuda"] = torch.cuda.get_rng_state_all()
        scratch = self.checkpoint.with_suffix(".part")
        try:
            with open(scratch, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self.checkpoint)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise cannot_write(self.checkpoint, error) from error
        self._saved = time.monotonic()

    def _load(self) -> None:
        try:
            content: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            raise UsageError(f"cannot read {self.checkpoint}", "remove it to start afresh") from error
        if not isinstance(content, dict) or content.get("fingerprint") != self.fingerprint:
            raise UsageError(
                f"{self.checkpoint} belongs to a run with other data or settings",
                "repeat that run's command, or choose another output folder",
            )
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, content["parameters"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(content["optimizer"])
        self.state = _State(**content["state"])
        self.curves = Curves(**content["curves"])
        self._pending = content["pending"]
        torch.set_rng_state(content["random"])
        if torch.cuda.is_available() and "random_cuda" in content:
            torch.cuda.set_rng_state_all(content["random_cuda"])


def schedule(progress: float, warmup: float) -> float:
    """Share of the learning rate: a linear warm-up, then half a cosine down to a twentieth."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    along = (progress - warmup) / max(1e-9, 1 - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along))


def _losses_per_entry(steps: int) -> int:
    """So that the loss curve has about 200 entries."""
    return max(1, steps // 200)


def _decayed(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Norms and biases do not decay."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
