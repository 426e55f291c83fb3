"""Drafters made of a trained head: find its files, load it, fit it to the target."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spectune.decoding.drafter import Drafter
from spectune.decoding.eagle_drafter import EagleDrafter, EagleTreeDrafter
from spectune.decoding.loading import Loaded, digest_of
from spectune.decoding.mlp_drafter import MlpDrafter
from spectune.decoding.parallel_drafter import ParallelDrafter
from spectune.decoding.product import Product
from spectune.decoding.random_heads import random_head
from spectune.decoding.shapes import RANDOM_HEAD
from spectune.errors import UsageError
from spectune.heads.checkpoint import detect_family, making_head
from spectune.heads.eagle_layouts import load_eagle
from spectune.heads.medusa_layouts import load_blockwise, load_medusa, load_mlp
from spectune.sweeping.cell import ModelInfo, WeightOrigin

DEMO = "demo"
_HEAD_FILES = [
    "config.json",
    "training.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
]


@dataclass(frozen=True, slots=True)
class Built:
    drafter: Drafter
    info: ModelInfo


def demo_drafts() -> Path:
    """The folder with the drafts that ship for SmolLM2."""
    return Path(str(files("spectune") / "drafts" / "smollm2"))


def head_folder(kind: str, where: str) -> Path:
    """The folder of a head: `demo`, a local folder, or the hub's files.

    Raises:
        UsageError: nothing there.
    """
    if not where:
        raise UsageError(f"{kind} needs a head", f"for example {kind}:demo, {kind}:./my-head or {kind}:OWNER/NAME")
    if where == DEMO:
        folder = demo_drafts() / kind
        if not folder.is_dir():
            raise UsageError(f"no {kind} head ships with spectune", "name a folder or a hub id")
        return folder
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    if where.startswith((".", "/", "~")) or where.count("/") != 1:
        raise UsageError(f"no folder {where}", f"{kind}: name a folder with config.json and weights, or a hub id")
    from huggingface_hub import snapshot_download  # only a head on the hub needs it

    try:
        return Path(snapshot_download(where, allow_patterns=_HEAD_FILES))
    except Exception as error:  # whatever the hub or the network raises
        first_line = str(error).strip().split("\n")[0]
        raise UsageError(f"cannot fetch {where!r}: {first_line}", "without a network, name a local folder") from error


def build_head(
    kind: str,
    where: str,
    target: Loaded,
    *,
    tree: bool,
    device: torch.device,
    dtype: torch.dtype,
    product: type[Product] = Product,
) -> Built:
    """A drafter from a trained head, or from an untrained one of the target's geometry where `where` is `shape`.

    Args:
        kind: eagle, eagle3, medusa, blockwise or mlp-speculator.
        tree: draft a tree.
        product: what multiplies with the head's matrices.

    Raises:
        UsageError: no such head, another family than `kind`, or a head for another target.
    """
    if where == RANDOM_HEAD:
        digest = f"random-{kind}-{target.info.digest}"
        return _build(
            kind, where, random_head(kind, target.model), digest, "random", target, tree, device, dtype, product
        )
    folder = head_folder(kind, where)
    with making_head(folder):
        family = detect_family(folder)
        if family != kind:
            name = {"exit": f"early-exit:{where}", "causal-lm": where}.get(family, f"{family}:{where}")
            raise UsageError(f"{where} holds a {family} head, not {kind}", f"write {name}")
        head = _load(kind, folder, target.model.layers_count)
        return _build(kind, where, head, digest_of(folder), "trained", target, tree, device, dtype, product)


def _build(
    kind: str,
    where: str,
    head: Any,
    digest: str,
    weights: WeightOrigin,
    target: Loaded,
    tree: bool,
    device: torch.device,
    dtype: torch.dtype,
    product: type[Product],
) -> Built:
    """Bind a head to the target and make its drafter."""
    if tree and kind == "mlp-speculator":
        raise UsageError("an MLP speculator drafts chains only", f"write {kind}:{where}")
    layers, vocab = target.model.layers_count, target.model.vocab_size
    head = head.to(device, dtype)
    head.bind(target.model.embedding.to(device, dtype), target.model.head_rows().to(device, dtype))
    head.eval().requires_grad_(False)
    # Before the drafter, which may lay out weights of its own.
    info = head_info(f"{kind}:{where}", digest, head, device, dtype, vocab).model_copy(update={"weights": weights})
    if kind in ("eagle", "eagle3"):
        eagle = EagleTreeDrafter if tree else EagleDrafter
        return Built(eagle(head, target_vocab=vocab, product=product), info)
    if kind == "mlp-speculator":
        return Built(MlpDrafter(head, layers=layers, target_vocab=vocab, product=product), info)
    return Built(ParallelDrafter(head, layers=layers, target_vocab=vocab, tree=tree, product=product), info)


def _load(kind: str, folder: Path, layers: int) -> Any:
    """The head's module, not bound yet."""
    match kind:
        case "eagle" | "eagle3":
            return load_eagle(folder, layers)
        case "mlp-speculator":
            return load_mlp(folder)
        case "medusa":
            return load_medusa(folder)
        case _:
            return load_blockwise(folder)


def head_info(name: str, digest: str, head: Any, device: torch.device, dtype: torch.dtype, vocab: int) -> ModelInfo:
    """Facts about a head: what one draft step reads, its own cache, its size."""
    looked_up = {id(p) for module in head.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    read = sum(p.numel() * p.element_size() for p in head.parameters() if id(p) not in looked_up)
    rows = getattr(head, "head_rows", None)
    if rows is None:
        rows = getattr(head, "shared_head", None)
    config = head.config
    steps = config.steps if hasattr(config, "steps") and not config.tie_weights else 1
    layers = config.layers if hasattr(config, "kv_heads") else 0
    return ModelInfo(
        name=name,
        digest=digest,
        parameters=sum(p.numel() for p in head.parameters()),
        weight_bytes_per_step=read // steps + (0 if rows is None else rows.numel() * rows.element_size()),
        kv_bytes_per_token=2 * layers * config.kv_heads * config.head_dim * dtype.itemsize if layers else 0,
        layers=layers,
        vocab_size=vocab if head.draft_ids is None else len(head.draft_ids),
        max_context=getattr(config, "context", 1 << 30),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )
