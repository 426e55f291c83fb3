"""Drafters by name: `ngram`, `early-exit:8`, `layer-skip:10-14,20`, or a draft model's folder or hub id."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import torch

from spectune.decoding.adapter import CausalModel
from spectune.decoding.drafter import Drafter
from spectune.decoding.loading import Loaded, load, shared_vocabulary, weight_bytes_per_step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.ngram import MAX_NGRAM, MIN_NGRAM, NgramDrafter
from spectune.errors import UsageError
from spectune.sweeping.cell import ModelInfo

KINDS = ("ngram", "early-exit", "layer-skip")


@dataclass(frozen=True, slots=True)
class BuiltDrafter:
    drafter: Drafter
    info: ModelInfo | None  # None: no weights
    notes: tuple[str, ...] = ()


def build_drafter(
    name: str,
    target: Loaded,
    *,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> BuiltDrafter:
    """Make the drafter that `name` asks for.

    Raises:
        UsageError: a malformed name, layers the target lacks, a missing model or another tokenizer.
    """
    kind, _, argument = name.partition(":")
    if kind == "ngram":
        return BuiltDrafter(_ngram(name, argument), None)
    if kind == "early-exit":
        kept = _whole_number(name, argument)
        if not 0 < kept < target.info.layers:
            raise UsageError(
                f"{name!r}: the target has {target.info.layers} layers; exit after 1 to {target.info.layers - 1}"
            )
        return _self_speculative(name, target, list(range(kept)))
    if kind == "layer-skip":
        skipped = parse_layers(name, argument)
        if max(skipped) >= target.info.layers:
            raise UsageError(f"{name!r}: the target's layers are 0 to {target.info.layers - 1}")
        return _self_speculative(name, target, [i for i in range(target.info.layers) if i not in skipped])
    close = difflib.get_close_matches(kind, KINDS, n=1)
    if close and "/" not in name and not Path(name).is_dir():
        raise UsageError(f"no drafter {name!r}", f"did you mean {close[0]}? A model folder here is written ./{name}")
    loaded = load(name, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    notes: tuple[str, ...] = ()
    if loaded.model.vocab_size != target.model.vocab_size:
        notes = (
            f"vocabularies are padded differently ({loaded.model.vocab_size} in the draft, "
            f"{target.model.vocab_size} in the target); ids the tokenizer does not know are never proposed",
        )
    drafter = ModelDrafter(
        loaded.model, shared_vocab=shared_vocabulary(target, loaded), target_vocab=target.model.vocab_size
    )
    return BuiltDrafter(drafter, loaded.info, notes)


def _ngram(name: str, argument: str) -> NgramDrafter:
    if not argument:
        return NgramDrafter(MIN_NGRAM, MAX_NGRAM)
    low, _, high = argument.partition("-")
    sizes = _whole_number(name, low), _whole_number(name, high or low)
    if not 1 <= sizes[0] <= sizes[1]:
        raise UsageError(f"{name!r}: want ngram:MIN-MAX with 1 <= MIN <= MAX")
    return NgramDrafter(*sizes)


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise UsageError(f"drafter {name!r} needs a whole number where {text!r} stands", "for example early-exit:8")
    return int(text)


def parse_layers(name: str, text: str) -> set[int]:
    """`10-14,20` -> {10, 11, 12, 13, 14, 20}."""
    layers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first = _whole_number(name, low)
        last = _whole_number(name, high) if dash else first
        if last < first:
            raise UsageError(f"drafter {name!r}: {part!r} runs backwards")
        layers.update(range(first, last + 1))
    return layers


def _self_speculative(name: str, target: Loaded, layers: list[int]) -> BuiltDrafter:
    """The target with fewer layers, on the target's own cache."""
    model = target.model.subset(layers)
    drafter = ModelDrafter(
        model,
        shared_vocab=target.model.vocab_size,
        target_vocab=target.model.vocab_size,
        shares_target_cache=True,
    )
    return BuiltDrafter(drafter, _subset_info(name, target, model, len(layers)))


def _subset_info(name: str, target: Loaded, model: CausalModel, layers: int) -> ModelInfo:
    return target.info.model_copy(
        update={
            "name": name,
            "digest": f"{target.info.digest}/{name}",
            "parameters": sum(p.numel() for p in model.model.parameters()),
            "weight_bytes_per_step": weight_bytes_per_step(model.model),
            "kv_bytes_per_token": target.info.kv_bytes_per_token * layers // target.info.layers,
            "layers": layers,
        }
    )
