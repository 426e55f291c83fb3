"""What `spectune train` can be asked for, checked before anything is loaded."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.sweeping.options import MOST_THREADS

_MOST = {"threads": MOST_THREADS, "heads": 64}
METHODS = ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit", "layer-skip")

# Options that only some methods know.
_ONLY_FOR = {
    "layers": ("draft",),
    "exit_layer": ("exit",),
    "start": ("eagle", "eagle3"),
    "heads": ("medusa", "blockwise"),
    "draft_vocab": ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit"),
    "compact": ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit"),
    "epochs": ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit"),
    "learning_rate": ("draft", "medusa", "blockwise", "eagle", "eagle3", "exit"),
}
# Those of them that shape the result: a run can only be resumed with the same.
_DECISIVE = (
    "method",
    "start",
    "layers",
    "exit_layer",
    "heads",
    "draft_vocab",
    "epochs",
    "learning_rate",
    "minutes",
    "seed",
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One training. None stands for the method's or the device's own choice.

    mix: shares of the kinds of prompts that the target answers, such as code=0.8,math=0.2.
    tokens: how much text of the target to train on. minutes: most time for the training itself.
    start: a trained head to go on from: a folder, a hub id, or `demo`.
    draft_vocab: ids that the draft may propose; 0 for all of the target's.
    compact: small files that only spectune reads.
    """

    method: str
    target: str = "smollm2"
    text: str | None = None
    mix: str | None = None
    tokens: int | None = None
    minutes: float | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    start: str | None = None
    layers: int | None = None
    exit_layer: int | None = None
    heads: int | None = None
    draft_vocab: int | None = None
    compact: bool = False
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            close = difflib.get_close_matches(self.method, METHODS, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"no method {self.method!r}", f"{meant}the methods are {', '.join(METHODS)}")
        for name, methods in _ONLY_FOR.items():
            if getattr(self, name) not in (None, False) and self.method not in methods:
                raise UsageError(f"{flag(name)} is not for {self.method}", f"it is for {', '.join(methods)}")
        if self.mix is not None:
            if self.text is not None:
                raise UsageError("--mix is of our own prompts, and --text takes yours", "leave one of them out")
            from spectune.training.prompts import training_book

            training_book(self.mix)
        for name in ("tokens", "epochs", "layers", "exit_layer", "heads", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} must be 1 or more, not {value}")
        for name, most in _MOST.items():
            if (getattr(self, name) or 0) > most:
                raise UsageError(f"{flag(name)} must be at most {most}, not {getattr(self, name)}")
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{flag(name)} must be more than 0 and finite, not {value}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"--seed must fit 64 bits, not {self.seed}")
        if self.draft_vocab is not None and self.draft_vocab < 0:
            raise UsageError(f"--draft-vocab must be 0 or more, not {self.draft_vocab}")
        if self.start is not None and self.draft_vocab is not None:
            raise UsageError("--draft-vocab is for a new head", "a head to go on from keeps its own; leave it out")
        if self.method == "draft" and self.draft_vocab and not self.compact:
            raise UsageError(
                "a model folder for transformers has the whole vocabulary", "add --compact, or leave --draft-vocab out"
            )

    def fingerprint(self, target_digest: str, texts_digest: str) -> str:
        """Hash of all that decides the trained weights."""
        shape: dict[str, Any] = {name: value for name, value in asdict(self).items() if name in _DECISIVE}
        shape |= {"target": target_digest, "texts": texts_digest}
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
