"""Drafters by name.

    ngram, ngram:2-5                  lookup in the row's own text
    FOLDER or HUB/ID                  a draft model; smollm2-1l and smollm2-4l ship with spectune
    early-exit:8, early-exit:HEAD     the target's first layers, with its own head or a trained exit
    layer-skip:12-15,a3, layer-skip:FOLDER    the target without some blocks, named or searched
    medusa:HEAD, blockwise:HEAD, eagle:HEAD, eagle3:HEAD, mlp-speculator:HEAD
    tree:NAME                         the same drafter, drafting trees; eagle2:HEAD is tree:eagle:HEAD
    sequoia:NAME, specinfer:NAME      trees of a planned shape, children drawn without or with replacement
    int8:NAME                         the same drafter with its weights in 8 bits, on a CPU; tree:int8:NAME drafts trees
    int8:target                       the target itself in 8 bits, on the target's own cache
    staged:A>B                        A drafts for B, B for the target

HEAD is a folder, a hub id, or `demo` for the heads that ship for SmolLM2. Models can be `shape:…` and `grown:…` (see
`loading`), and eagle, eagle3 and medusa heads `shape`, an untrained one of the target's geometry.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from spectune.decoding.adapter import CausalModel, layer_numbers
from spectune.decoding.drafter import Drafter
from spectune.decoding.exit_drafter import exit_drafter
from spectune.decoding.grown import PREFIX as GROWN
from spectune.decoding.head_drafters import DEMO, build_head, demo_drafts, head_folder
from spectune.decoding.layer_skip import skip_of, skipped_model
from spectune.decoding.lean import FAMILIES, LeanModel
from spectune.decoding.loading import Loaded, digest_of, load, shared_vocabulary, weight_bytes_per_step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.ngram import MAX_NGRAM, MIN_NGRAM, NgramDrafter, NgramTreeDrafter
from spectune.decoding.product import Int8Product, Product
from spectune.decoding.pruned_drafter import pruned_drafter
from spectune.decoding.shapes import PREFIX as SHAPE
from spectune.decoding.staged import stage_names, staged
from spectune.decoding.tree_calibration import CalibratedShapes
from spectune.decoding.tree_drafter import Plan, TreeModelDrafter
from spectune.decoding.tree_plans import DynamicPlan, StaticPlan
from spectune.errors import UsageError
from spectune.heads.checkpoint import making_head
from spectune.heads.medusa_layouts import load_exit
from spectune.heads.pruned import is_pruned, load_pruned
from spectune.sweeping.cell import ModelInfo
from spectune.sweeping.drafter_names import HEADS, INT8, KINDS, TREE_PREFIXES, WHOLE_TARGET, drafts_trees
from spectune.sweeping.memory import bytes_per_weight


@dataclass(frozen=True, slots=True)
class BuiltDrafter:
    """A drafter with what a reader of its results should know."""

    drafter: Drafter
    info: ModelInfo | None  # None: no weights
    fixed_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The drafter's own notes grow while it plans trees."""
        return (*self.fixed_notes, *getattr(self.drafter, "notes", ()))


@dataclass(frozen=True, slots=True)
class _Setting:
    target: Loaded
    device: torch.device
    dtype: torch.dtype
    revision: str | None
    trust_remote_code: bool
    int8: bool = False  # store weights in 8 bits


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
        UsageError: a malformed name, layers the target lacks, a missing model, a head for another target, or another
            tokenizer.
    """
    return _build(name, _Setting(target, device, dtype, revision, trust_remote_code))


def _build(name: str, setting: _Setting) -> BuiltDrafter:
    kind, _, argument = name.partition(":")
    if kind == "ngram":
        return BuiltDrafter(_ngram(NgramDrafter, name, argument), None)
    if kind == "eagle2":
        kind, argument = "tree", f"eagle:{argument}"
    if kind in HEADS:
        return _head(kind, argument, setting, tree=False)
    if kind in TREE_PREFIXES:
        return _tree(name, kind, argument, setting)
    if kind == "staged":
        return _staged(name, argument, setting)
    if kind == INT8:
        return _int8(name, argument, setting)
    return _model(name, setting)


def _int8(name: str, inner: str, setting: _Setting) -> BuiltDrafter:
    """A drafter of chains with its weights in 8 bits."""
    kind = inner.partition(":")[0]
    if kind in ("", "ngram", INT8):
        what = f"{inner} has no weights" if kind == "ngram" else f"{name!r} names no drafter"
        raise UsageError(what, f"for example {INT8}:eagle3:demo, or {INT8}:{WHOLE_TARGET} for the target itself")
    if kind in (*TREE_PREFIXES, "eagle2", "staged"):
        rest = inner.partition(":")[2]
        if rest.partition(":")[0] in ("", "ngram", "eagle2", *TREE_PREFIXES):
            rest = "NAME"
        special = {"eagle2": f"tree:{INT8}:eagle:{rest}", "staged": f"staged:ngram>{INT8}:NAME"}
        right = special.get(kind, f"{kind}:{INT8}:{rest}")
        raise UsageError(f"{INT8} stands before the drafter whose weights it stores", f"write {right}")
    return _build(inner, replace(setting, int8=True))


def _head(kind: str, where: str, setting: _Setting, *, tree: bool) -> BuiltDrafter:
    built = build_head(
        kind,
        where,
        setting.target,
        tree=tree,
        device=setting.device,
        dtype=setting.dtype,
        product=Int8Product if setting.int8 else Product,
    )
    info = _int8_info(built.info) if setting.int8 else built.info
    return BuiltDrafter(built.drafter, info)


def _int8_info(info: ModelInfo) -> ModelInfo:
    """Facts about a drafter whose weights have become 8 bits each.

    Norms and scales, which have not, are few; nor has a model's embedding, of which a step reads a row.
    """
    return info.model_copy(
        update={
            "name": f"{INT8}:{info.name}",
            "digest": f"{INT8}/{info.digest}",
            "weight_bytes_per_step": info.weight_bytes_per_step // bytes_per_weight(info),
            "int8": True,
        }
    )


def _tree(name: str, kind: str, inner: str, setting: _Setting) -> BuiltDrafter:
    """A drafter that drafts trees of the kind."""
    if not inner:
        raise UsageError(f"{name!r} names no drafter", f"for example {kind}:eagle3:demo")
    if inner.startswith(f"{INT8}:"):
        inner, setting = inner.removeprefix(f"{INT8}:"), replace(setting, int8=True)
    inner_kind, _, argument = inner.partition(":")
    if inner_kind in ("staged", "eagle2", *TREE_PREFIXES) or (setting.int8 and inner_kind in ("", "ngram", INT8)):
        raise UsageError(
            f"{inner_kind or INT8} cannot draft inside {kind}", f"name a plain drafter: {kind}:eagle3:demo"
        )
    if inner_kind == "ngram" or inner_kind in HEADS:
        if kind != "tree":
            raise UsageError(f"{kind} plans trees for language models, not for {inner_kind}", f"use tree:{inner}")
        if inner_kind == "ngram":
            return BuiltDrafter(_ngram(NgramTreeDrafter, name, argument), None)
        return _renamed(_head(inner_kind, argument, setting, tree=True), name)
    chain = _model(inner, setting)
    assert isinstance(chain.drafter, ModelDrafter)
    assert chain.info is not None
    plan: Plan = DynamicPlan()
    if kind != "tree":
        siblings: Literal["without_replacement", "iid"] = "without_replacement" if kind == "sequoia" else "iid"
        shapes = CalibratedShapes(setting.target, chain.drafter, chain.info.digest, siblings)
        plan = StaticPlan(shapes, siblings)
    built = BuiltDrafter(TreeModelDrafter(chain.drafter, plan), chain.info, chain.fixed_notes)
    return _renamed(built, name)


def _renamed(built: BuiltDrafter, name: str) -> BuiltDrafter:
    """A tree drafts otherwise than a chain of the same weights: its digest is its own."""
    assert built.info is not None
    kind = name.partition(":")[0]
    info = built.info.model_copy(update={"name": name, "digest": f"{kind}/{built.info.digest}"})
    return BuiltDrafter(built.drafter, info, built.fixed_notes)


def _staged(name: str, argument: str, setting: _Setting) -> BuiltDrafter:
    names = stage_names(name, argument)
    if drafts_trees(names[0]):
        raise UsageError(f"the first stage of {name!r} drafts trees", "name a drafter of chains: staged:ngram>MODEL")
    stages = [_build(stage, setting) for stage in names]
    infos = [stage.info for stage in stages if stage.info is not None]
    if not infos:
        raise UsageError(f"{name!r}: the last stage needs a model", "write staged:ngram>MODEL")
    last = infos[-1]
    info = last.model_copy(
        update={
            "name": name,
            "digest": ">".join(stage.info.digest if stage.info else "none" for stage in stages),
            "parameters": sum(info.parameters for info in infos),
            "kv_bytes_per_token": sum(info.kv_bytes_per_token for info in infos),
        }
    )
    notes = tuple(note for stage in stages for note in stage.notes)
    return BuiltDrafter(staged([stage.drafter for stage in stages]), info, notes)


def _model(name: str, setting: _Setting) -> BuiltDrafter:
    """A ModelDrafter: the target's own layers, or a draft model."""
    if not setting.int8:
        return _float_model(name, setting)
    if name == WHOLE_TARGET:
        built = _self_speculative(name, setting.target, setting.target.model)
    else:
        built = _float_model(name, setting)
    assert isinstance(built.drafter, ModelDrafter)
    assert built.info is not None
    if not isinstance(built.drafter.model, LeanModel):
        raise UsageError(
            f"{name!r} cannot be stored in 8 bits: only models of these families are, {', '.join(sorted(FAMILIES))}",
            f"leave {INT8}: out",
        )
    built.drafter.model = built.drafter.model.int8()
    return BuiltDrafter(built.drafter, _int8_info(built.info), built.fixed_notes)


def _float_model(name: str, setting: _Setting) -> BuiltDrafter:
    """A ModelDrafter in the setting's own type."""
    kind, _, argument = name.partition(":")
    target = setting.target
    if kind == "early-exit":
        return _early_exit(name, argument, setting)
    if kind == "layer-skip":
        if not argument:
            raise UsageError(f"{name!r} names no layers", "for example layer-skip:12-15")
        where = str(head_folder(kind, DEMO)) if argument == DEMO else argument
        return _self_speculative(name, target, skipped_model(target.model, skip_of(name, where)))
    if (folder := _pruned_folder(name)) is not None:
        with making_head(folder):
            drafter = pruned_drafter(target.model, load_pruned(folder))
        return BuiltDrafter(drafter, _info(name, target, drafter.model, digest_of(folder), own=True))
    close = difflib.get_close_matches(kind, KINDS, n=1)
    if close and "/" not in name and not Path(name).is_dir():
        raise UsageError(f"no drafter {name!r}", f"did you mean {close[0]}? A model folder here is written ./{name}")
    loaded = load(
        name,
        device=setting.device,
        dtype=setting.dtype,
        revision=setting.revision,
        trust_remote_code=setting.trust_remote_code,
    )
    notes: tuple[str, ...] = ()
    if loaded.model.vocab_size != target.model.vocab_size:
        notes = (
            f"vocabularies are padded differently ({loaded.model.vocab_size} in the draft, "
            f"{target.model.vocab_size} in the target); ids the tokenizer does not know are never proposed",
        )
    model_drafter = ModelDrafter(
        loaded.model, shared_vocab=shared_vocabulary(target, loaded), target_vocab=target.model.vocab_size
    )
    return BuiltDrafter(model_drafter, loaded.info, notes)


def _pruned_folder(name: str) -> Path | None:
    """Where a pruned draft of our own format lies, if `name` is one."""
    if name.startswith((SHAPE, GROWN)):
        return None
    shipped = demo_drafts() / name.removeprefix("smollm2-")
    if name.startswith("smollm2-") and shipped.is_dir():
        return shipped
    folder = Path(name).expanduser()
    return folder if folder.is_dir() and is_pruned(folder) else None


def _early_exit(name: str, argument: str, setting: _Setting) -> BuiltDrafter:
    target = setting.target
    if argument.isascii() and argument.isdecimal():
        kept = _whole_number(name, argument)
        if not 0 < kept < target.info.layers:
            raise UsageError(
                f"{name!r}: the target has {target.info.layers} layers; exit after 1 to {target.info.layers - 1}"
            )
        return _self_speculative(name, target, target.model.subset(list(range(kept))))
    folder = head_folder("early-exit", argument)
    with making_head(folder):
        drafter = exit_drafter(target.model, load_exit(folder))
    return BuiltDrafter(drafter, _info(name, target, drafter.model, digest_of(folder)))


def _ngram(kind: type[NgramDrafter], name: str, argument: str) -> NgramDrafter:
    if not argument:
        return kind(MIN_NGRAM, MAX_NGRAM)
    low, _, high = argument.partition("-")
    sizes = _whole_number(name, low), _whole_number(name, high or low)
    if not 1 <= sizes[0] <= sizes[1]:
        raise UsageError(f"{name!r}: want ngram:MIN-MAX with 1 <= MIN <= MAX")
    return kind(*sizes)


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise UsageError(f"drafter {name!r} needs a whole number where {text!r} stands", "for example early-exit:8")
    return int(text)


def _self_speculative(name: str, target: Loaded, model: CausalModel) -> BuiltDrafter:
    """The target with fewer layers, on the target's own cache."""
    drafter = ModelDrafter(
        model,
        shared_vocab=target.model.vocab_size,
        target_vocab=target.model.vocab_size,
        shares_target_cache=True,
    )
    return BuiltDrafter(drafter, _info(name, target, model, target.info.digest))


def _info(name: str, target: Loaded, model: CausalModel, digest: str, *, own: bool = False) -> ModelInfo:
    """Facts about a model made of the target's parts; `own` says that digest names weights of its own."""
    layers = len(layer_numbers(model.model))
    return target.info.model_copy(
        update={
            "name": name,
            "digest": f"{target.info.digest}/{digest}" if own else f"{digest}/{name}",
            "parameters": sum(p.numel() for p in model.model.parameters()),
            "weight_bytes_per_step": weight_bytes_per_step(model.model),
            "kv_bytes_per_token": target.info.kv_bytes_per_token * layers // target.info.layers,
            "layers": layers,
        }
    )
