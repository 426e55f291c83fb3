"""What training.json says: how a drafter was made, on what, and how good it is on held-out text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from spectune import __version__
from spectune.decoding.loading import Loaded
from spectune.training.data import TrainingData
from spectune.training.layer_skip import Found
from spectune.training.loop import Curves, HeldOut
from spectune.training.methods import Vocabulary
from spectune.training.options import TrainOptions


def about(options: TrainOptions, command: Sequence[str], target: Loaded) -> dict[str, Any]:
    """What every record begins with."""
    return {
        "spectune_version": __version__,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "options": asdict(options),
        "target": {"name": target.info.name, "digest": target.info.digest, "dtype": target.info.dtype},
        "device": target.info.device,
        "threads": torch.get_num_threads(),
    }


def of_start(folder: Path) -> dict[str, Any]:
    """What is known of the head that a training goes on from: the record beside it, if there is one."""
    try:
        record = json.loads((folder / "training.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    kept = ("spectune_version", "finished_at", "command", "start", "text", "tokens_seen", "held_out", "curve")
    return {"start": {name: record[name] for name in kept if name in record}}


def of_training(
    data: TrainingData,
    digest: str,
    vocabulary: Vocabulary,
    trained_weights: int,
    seconds: Mapping[str, float],
    curves: Curves,
    found: HeldOut,
) -> dict[str, Any]:
    """The record of trained weights. `digest` is that of the text, `found` the figures on all held-out text."""
    return {
        "trained_weights": trained_weights,
        "text": {
            "digest": digest,
            "texts": len(data.training),
            "tokens": sum(text.written for text in data.training),
            "held_out_texts": len(data.apart),
            "held_out_tokens": sum(text.written for text in data.apart),
        },
        "draft_vocabulary": {"size": vocabulary.size, "held_out_coverage": round(vocabulary.coverage, 5)},
        "tokens_seen": curves.tokens,
        "seconds": {name: round(value, 1) for name, value in (dict(seconds) | {"training": curves.seconds}).items()},
        "held_out": _figures(found) | {"acceptance_length": round(found.acceptance_length, 4)},
        "curve": [
            {"tokens": tokens} | _figures(HeldOut(acceptance, overlap))
            for tokens, acceptance, overlap in curves.held_out
        ],
        "losses": [[tokens, round(loss, 5)] for tokens, loss in curves.losses],
    }


def of_search(found: Found) -> dict[str, Any]:
    """The record of a search for layers to skip."""
    assert found.best is not None, "one set at least is measured"
    return {
        "skip": found.best.skip.parts,
        "best": asdict(found.best),
        "measured": len(found.measured),
        "ranking": {block: round(share, 4) for block, share in found.ranking.items()},
        "seconds": {"search": round(found.seconds, 1)},
    }


def _figures(found: HeldOut) -> dict[str, list[float]]:
    return {"acceptance": _rounded(found.acceptance), "overlap": _rounded(found.overlap)}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]
