"""What a user asks of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, get_args

from pydantic import ValidationError

from spectune.errors import UsageError
from spectune.speedup.precision import parse_precision
from spectune.sweeping.cell import Rule, Sampling
from spectune.sweeping.counts import parse_counts

DEMO_TARGET = "smollm2"
DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLING_SETTINGS = tuple(Sampling.model_fields)

MOST_THREADS = 4096

PLANS = ("fast", "full")

# The decoder takes lower temperatures for greedy decoding, where other rules hold.
LOWEST_TEMPERATURE = 1e-5


def _many(option: str, *default: Any) -> Any:
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """The grid (suites x batches x drafts x ks) and everything its cells share.

    A sampling setting of None is unspecified: the model's own with `model_sampling`, else neutral (greedy).
    `peak_bandwidth` is in GB/s. Raises UsageError for a value that no sweep can have.
    """

    target: str = DEMO_TARGET
    drafts: tuple[str, ...] = _many("draft", "ngram")
    suites: tuple[str, ...] = _many("suite", "code", "math", "creative")
    ks: tuple[int, ...] = _many("k", 2, 4, 8)
    batches: tuple[int, ...] = _many("batch", 1)
    plan: str = "fast"
    repeats: int = 1
    prompts: int | None = None
    sample_seed: int | None = None
    precision: str | None = None
    categories: tuple[str, ...] = _many("category")
    column: str | None = None
    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    model_sampling: bool = False
    rule: str | None = None
    synthetic_acceptance: str | None = None
    seed: int = 0
    ignore_eos: bool = False
    chat: bool | None = None
    dtype: str = "auto"
    device: str = "auto"
    draft_device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    graphs: bool | None = None
    peak_bandwidth: float | None = None
    memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        parse_counts(self.ks, "--k", least=0)
        parse_counts(self.batches, "--batch")
        _unique(self.drafts, "--draft")
        _unique(self.suites, "--suite")
        for name in ("repeats", "prompts", "max_new_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} must be at least 1, not {value}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise UsageError(f"--threads must be at most {MOST_THREADS}, not {self.threads}")
        if self.peak_bandwidth is not None and not 0 < self.peak_bandwidth < float("inf"):
            raise UsageError(f"--peak-bandwidth must be above 0 GB/s, not {self.peak_bandwidth}")
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"--memory-fraction must be above 0 and at most 1, not {self.memory_fraction}")
        if self.precision is not None:
            parse_precision(self.precision)
        if self.plan not in PLANS:
            raise UsageError(f"no plan {self.plan!r}", f"the plans are {' and '.join(PLANS)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"no dtype {self.dtype!r}", f"the dtypes are {', '.join(DTYPES)}")
        if self.rule is not None and self.rule not in get_args(Rule):
            raise UsageError(f"no rule {self.rule!r}", f"the rules are {', '.join(get_args(Rule))}")
        self.sampling(Sampling())

    def sampling(self, unspecified: Sampling) -> Sampling:
        """The sampling settings, with `unspecified` for those that the user left open."""
        given = {n: getattr(self, n) for n in SAMPLING_SETTINGS if getattr(self, n) is not None}
        try:
            sampling = Sampling(**(unspecified.model_dump() | given))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise UsageError(f"{flag(name)} {given.get(name)}: {first['msg'].lower()}") from None
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise UsageError(
                f"a temperature of {sampling.temperature:g} is greedy decoding in effect",
                "use --temperature 0",
            )
        return sampling


def option_names() -> dict[str, str]:
    """Field of SweepOptions -> its long option without dashes, as config files spell it."""
    return {f.name: f.metadata.get("option", f.name) for f in fields(SweepOptions)}


def flag(field_name: str) -> str:
    """The long option of a field."""
    return "--" + option_names()[field_name].replace("_", "-")


def _unique(names: tuple[str, ...], what: str) -> None:
    if not names:
        raise UsageError(f"{what} is needed at least once")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{what} names {twice} twice")
    if "" in names:
        raise UsageError(f"{what} is empty")
