"""What is asked of a server's module, and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from spectune.recommending.exports.measured import MeasuredAcceptance
from spectune.recommending.exports.names import Method, method
from spectune.recommending.exports.schedule import BatchK
from spectune.speedup.profile import Config
from spectune.sweeping.drafter_names import drafts_trees

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A configuration to express.

    `schedule` is empty where one K serves all batches. `acceptance` None leaves synthetic settings out.
    `same_vocabulary` says whether target and draft have equally many tokens; None where there is no draft model.
    """

    choice: Config
    target: str
    temperature: float = 0.0
    schedule: tuple[BatchK, ...] = ()
    acceptance: MeasuredAcceptance | None = None
    same_vocabulary: bool | None = None

    @property
    def method(self) -> Method:
        return method(self.choice.drafter)

    @property
    def tree(self) -> bool:
        return drafts_trees(self.choice.drafter)

    @property
    def most(self) -> int:
        """The largest K of the schedule, which servers reserve memory for."""
        return max(k for _, _, k in self.schedule)


@dataclass(frozen=True, slots=True)
class Variant:
    """Another form of the same configuration; `text` is None where `notes` say why."""

    text: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """A server's settings. `text` is a command, YAML or Python with one K; None where `notes` say why.

    `schedule` has a K per batch and is to be tried second; `synthetic` forces the measured acceptance, to time a
    server without its draft being right. `warnings` are known faults of this version with these settings, each with
    the number of the public thread.
    """

    engine: EngineName
    version: str
    text: str | None
    notes: tuple[str, ...] = ()
    schedule: Variant | None = None
    synthetic: Variant | None = None
    warnings: tuple[str, ...] = ()


def lacking(engine: EngineName, version: str, wanted: Wanted) -> Export:
    """One line for a method that the server does not have."""
    what = f"trees of {wanted.method}" if wanted.tree else f"{wanted.method} method"
    return Export(engine, version, None, (f"{version} has no {what}.",))


def allowed(settings: Mapping[str, _Value], keys: Collection[str]) -> dict[str, _Value]:
    """`settings`, all of whose keys the version takes. Raises KeyError for another: a fault of the module."""
    require(settings, keys)
    return dict(settings)


def require(names: Iterable[str], keys: Collection[str]) -> None:
    for name in names:
        if name not in keys:
            raise KeyError(f"{name} is not a setting of the stated version")
