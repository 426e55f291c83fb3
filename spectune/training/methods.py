"""From options to the method that is trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectune.decoding.demo import DEMO_NAME, demo_folder
from spectune.decoding.loading import Loaded
from spectune.errors import UsageError
from spectune.heads.eagle import EagleHead
from spectune.training.draft import DraftTraining, spread_layers
from spectune.training.loop import Method
from spectune.training.options import TrainOptions
from spectune.training.text import Text
from spectune.training.vocabulary import count_written, coverage, draft_vocabulary

_DRAFT_VOCAB = 8192  # covers nearly all of what a model writes, at a fraction of the head's cost
_SMALL_VOCAB = 4 * _DRAFT_VOCAB  # below this, trimming saves little
_DRAFT_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The draft vocabulary; `ids` None for the whole one. `coverage` is its share of the held-out text."""

    ids: Tensor | None
    size: int
    coverage: float


def check_sizes(options: TrainOptions, target: Loaded) -> None:
    """Refuse sizes that do not fit the target, before hours are spent on its text.

    Raises:
        UsageError: layers that the target lacks, an impossible draft vocabulary, or a head to go on from that does not
            fit.
    """
    layers = target.model.layers_count
    if options.start is not None:
        _trained_head(options, target)
    if options.method == "draft":
        spread_layers(_draft_layers(options, layers), layers)
    layer = _exit_layer(options, layers)
    if options.method == "exit" and not 0 < layer < layers:
        raise UsageError(f"an exit behind {layer} layers", f"the target has {layers}; choose 1 to {layers - 1}")
    size = options.draft_vocab
    if size is not None and size not in (0, target.model.vocab_size):
        draft_vocabulary(Counter(), size, target.model.vocab_size, _forced(target))


def choose_vocabulary(options: TrainOptions, target: Loaded, texts: list[Text]) -> Vocabulary:
    """The ids that the draft may propose, counted on the training text."""
    vocab_size = target.model.vocab_size
    held_out: Counter[int] = count_written(text for text in texts if text.is_held_out)
    if options.start is not None:
        kept = _trained_head(options, target).draft_ids
        if kept is None:
            return Vocabulary(None, vocab_size, 1.0)
        return Vocabulary(kept, len(kept), coverage(held_out, kept))
    size = options.draft_vocab
    if size is None:
        trims = vocab_size > _SMALL_VOCAB and (options.method != "draft" or options.compact)
        size = _DRAFT_VOCAB if trims else 0
    if size in (0, vocab_size):
        return Vocabulary(None, vocab_size, 1.0)
    counts = count_written(text for text in texts if not text.is_held_out)
    ids = draft_vocabulary(counts, size, vocab_size, _forced(target))
    return Vocabulary(ids.to(target.model.device), size, coverage(held_out, ids))


def make_method(options: TrainOptions, target: Loaded, vocabulary: Vocabulary) -> Method:
    """An untrained method on the target's device.

    Raises:
        UsageError: an architecture that the method cannot be made for.
    """
    model = target.model
    layers, rows, ids = model.layers_count, model.head_rows(), vocabulary.ids
    method: Any
    if options.method == "draft":
        kept = spread_layers(_draft_layers(options, layers), layers)
        method = DraftTraining(_original(options, target), rows, kept, ids)
    elif options.method == "medusa":
        from spectune.training.medusa import MedusaTraining

        method = MedusaTraining(rows, layers, ids, heads=options.heads or 4)
    elif options.method == "blockwise":
        from spectune.training.blockwise import BlockwiseTraining

        method = BlockwiseTraining(rows, layers, ids, heads=options.heads or 4)
    elif options.method == "exit":
        method = _exit(options, target, ids)
    else:
        from spectune.training.eagle import EagleTraining
        from spectune.training.eagle_start import start_head

        if options.start is None:
            method = EagleTraining(start_head(model, _version(options), ids), rows, layers)
        else:
            method = EagleTraining(_trained_head(options, target), rows, layers, trained=True)
    return cast(Method, method)


def _trained_head(options: TrainOptions, target: Loaded) -> EagleHead:
    from spectune.training.eagle_start import trained_head

    assert options.start is not None
    return trained_head(options.start, target.model, _version(options))


def _version(options: TrainOptions) -> Literal[1, 3]:
    return 3 if options.method == "eagle3" else 1


def _exit(options: TrainOptions, target: Loaded, ids: Tensor | None) -> Any:
    from spectune.training.eagle_start import last_layer
    from spectune.training.exit import ExitTraining

    layers = target.model.layers_count
    _, norm = last_layer(target.model)
    if norm is None:
        raise UsageError(f"{target.info.name!r} keeps its final norm in an unknown place", "train another method")
    eps = getattr(target.model.config, "rms_norm_eps", 1e-6)
    return ExitTraining(target.model.head_rows(), layers, norm, eps, _exit_layer(options, layers), ids)


def _draft_layers(options: TrainOptions, layers: int) -> int:
    return options.layers or max(1, min(_DRAFT_LAYERS, layers - 1))


def _exit_layer(options: TrainOptions, layers: int) -> int:
    return options.exit_layer or layers // 2


def _forced(target: Loaded) -> set[int]:
    """Ids that every draft vocabulary holds: those that end or shape a text."""
    return {*target.stop_ids, *getattr(target.tokenizer, "all_special_ids", ())}


def _original(options: TrainOptions, target: Loaded) -> Any:
    """The target as transformers loads it, in float32, to be cut down."""
    where = str(demo_folder()) if options.target == DEMO_NAME else options.target
    if where.startswith(("~", ".", "/")):
        where = str(Path(where).expanduser())
    model: Any = AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    return model.to(target.model.device)
