"""Files of Medusa heads, blockwise heads, MLP speculators and trained exits.

Read are the public layouts: Medusa of vLLM and of FasterDecoding, the MLP speculator of vLLM. Sizes come from the
tensors, not from the config: public configs say 2 heads where the file holds 5. Blockwise heads and exits have no
public layout; theirs is documented at `save_blockwise` and `save_exit`.

`compact` files leave out what the target has anyway (output rows) and store matrices in int8. They are what spectune
ships; other tools want the full files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.checkpoint import read_config, read_eps, read_tensors, save_tensors, tensor_names
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.mlp import MlpConfig, MlpSpeculator
from spectune.heads.parallel import RankAccuracy

TOKEN_MAP = "token_map"  # [D] absolute ids of the draft vocabulary


def load_medusa(folder: Path) -> MedusaHeads:
    """Medusa heads in vLLM's layout or FasterDecoding's, also inside a full "Medusa-2" model.

    Raises:
        UsageError: a tensor that is missing or has another shape than the others ask for.
    """
    config, tensors = read_config(folder), _medusa_tensors(folder)
    heads = _count(tensors, r"blocks\.(\d+)\.layers\.\d+\.weight")
    layers = _count(tensors, r"blocks\.0\.layers\.(\d+)\.weight")
    hidden = _tensor(tensors, "blocks.0.layers.0.weight").shape[-1]
    shared = tensors.get("lm_head.weight")
    own = shared is None and "lm_heads.0.weight" in tensors
    if own and config.get("original_lm_head"):
        shared, own = tensors.pop("lm_heads.0.weight"), False
    rows = _tensor(tensors, "lm_heads.0.weight") if own else shared
    map_ = tensors.get(TOKEN_MAP)
    vocab = _vocab_size(config, None if rows is None else len(rows), map_)
    ids, order = _draft_vocabulary(map_, vocab)
    size = vocab if ids is None else len(ids)

    def output(name: str, weight: Tensor) -> Tensor:
        if ids is not None and len(weight) == vocab:  # untrimmed rows beside a token map, as vLLM takes them
            weight = weight[ids]
        elif order is not None and len(weight) == size:
            weight = weight[order]
        return _shaped(name, weight, (size, hidden))

    module = MedusaHeads(
        MedusaConfig(
            hidden_size=hidden,
            vocab_size=vocab,
            heads=heads,
            layers=layers,
            own_heads=own,
            bias="blocks.0.layers.0.bias" in tensors,
            rank_accuracy=_rank_accuracy(config),
        ),
        ids,
    )
    wanted = {name: tensors.get(name) for name in module.state_dict()}
    for name, weight in wanted.items():
        if name.startswith("lm_heads.") and weight is not None:
            wanted[name] = output(name, weight)
    _fill(module, wanted)
    if shared is not None:
        module.shared_head = output("lm_head.weight", shared)
    return module


def save_medusa(folder: Path, heads: MedusaHeads, *, compact: bool = False, base_model: str | None = None) -> None:
    """Write Medusa heads.

    Heads with whole output matrices of their own go to FasterDecoding's layout, which TGI reads too;
    all others to vLLM's, with the shared output rows as `lm_head.weight` and the draft vocabulary as `token_map`.

    Args:
        base_model: the target's name, which FasterDecoding's loader takes from the config.
    """
    own = heads.config.own_heads
    tensors = dict(heads.state_dict())
    if own and heads.draft_ids is None and not compact:
        config: dict[str, Any] = {
            "medusa_num_heads": heads.heads,
            "medusa_num_layers": heads.config.layers,
            "rank_accuracy": heads.rank_accuracy,
        }
        names = {name: _faster_name(name, heads.config.layers) for name in tensors}
        file, tensors = "medusa_lm_head.safetensors", {names[name]: x for name, x in tensors.items()}
    else:
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": heads.hidden_size,
            "vocab_size": heads.vocab_size,
            "truncated_vocab_size": heads.draft_size,
            "num_heads": heads.heads,
            "num_hidden_layers": heads.config.layers,
            "medusa_fc_bias": heads.config.bias,
            "original_lm_head": not own,
            "max_paths": 64,
            "topk": 10,
            "rank_accuracy": heads.rank_accuracy,
        }
        file = "model.safetensors"
        if not own and not compact:
            tensors["lm_head.weight"] = heads.head_weight()
        if heads.draft_ids is not None:
            tensors[TOKEN_MAP] = heads.draft_ids
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    _save(folder, file, config, tensors, compact)


def load_blockwise(folder: Path) -> BlockwiseHeads:
    """Blockwise heads as `save_blockwise` writes them.

    Raises:
        UsageError: a tensor that is missing or has another shape than the others ask for.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    inner, hidden = _matrix(tensors, "inner.weight").shape
    outer = _matrix(tensors, "outer.weight").shape[0]
    if outer % hidden:
        raise UsageError(f"tensor outer.weight has {outer} rows, want a multiple of the hidden size {hidden}")
    vocab = _vocab_size(config, None, tensors.get(TOKEN_MAP))
    ids, _ = _draft_vocabulary(tensors.get(TOKEN_MAP), vocab)
    module = BlockwiseHeads(BlockwiseConfig(hidden, vocab, inner, outer // hidden, _rank_accuracy(config)), ids)
    _fill(module, tensors)
    return module


def save_blockwise(
    folder: Path, heads: BlockwiseHeads, *, compact: bool = False, base_model: str | None = None
) -> None:
    """Write blockwise heads: inner.{weight,bias}, outer.{weight,bias} and token_map; never the target's output rows."""
    config = {
        "spectune_head": "blockwise",
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.draft_size,
        "num_heads": heads.heads,
        "rank_accuracy": heads.rank_accuracy,
    }
    _save_ours(folder, config, heads, heads.draft_ids, compact)


def load_exit(folder: Path) -> ExitHead:
    """A trained exit as `save_exit` writes it.

    Raises:
        UsageError: a tensor that is missing or has another shape than the others ask for.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    rank, hidden = _matrix(tensors, "down.weight").shape
    vocab = _vocab_size(config, None, tensors.get(TOKEN_MAP))
    ids, _ = _draft_vocabulary(tensors.get(TOKEN_MAP), vocab)
    layer, eps = _number(config, "exit_layer"), read_eps(config, 1e-5)
    module = ExitHead(ExitConfig(layer, hidden, vocab, rank, eps), ids)
    _fill(module, tensors)
    return module


def save_exit(folder: Path, head: ExitHead, *, compact: bool = False) -> None:
    """Write an exit: norm.weight, down.weight, up.weight and token_map; never the target's output rows."""
    config = {
        "spectune_head": "exit",
        "exit_layer": head.config.layer,
        "hidden_size": head.config.hidden_size,
        "vocab_size": head.config.vocab_size,
        "rms_norm_eps": head.config.eps,
    }
    _save_ours(folder, config, head, head.draft_ids, compact)


def load_mlp(folder: Path) -> MlpSpeculator:
    """An MLP speculator in IBM's layout, as vLLM reads it; names may start with `speculator.`.

    Raises:
        UsageError: a tensor that is missing or has another shape than the others ask for.
    """
    config = read_config(folder)
    tensors = {name.removeprefix("speculator."): x for name, x in read_tensors(folder).items()}
    inner, hidden = _matrix(tensors, "proj.0.weight").shape
    settings = MlpConfig(
        hidden_size=hidden,
        inner_size=inner,
        vocab_size=len(_matrix(tensors, "head.0.weight")),
        steps=_number(config, "n_predict"),
        tie_weights=bool(config.get("tie_weights", False)),
        scale_input=bool(config.get("scale_input", False)),
    )
    if not settings.tie_weights:
        settings = replace(settings, steps=_count(tensors, r"head\.(\d+)\.weight"))
    module = MlpSpeculator(settings)
    _fill(module, tensors)
    return module


def save_mlp(folder: Path, module: MlpSpeculator) -> None:
    """Write an MLP speculator in IBM's layout."""
    settings = module.config
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": settings.hidden_size,
        "inner_dim": settings.inner_size,
        "vocab_size": settings.vocab_size,
        "n_predict": settings.steps,
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * settings.steps,
        "tie_weights": settings.tie_weights,
        "scale_input": settings.scale_input,
    }
    _save(folder, "model.safetensors", config, {f"speculator.{n}": x for n, x in module.state_dict().items()}, False)


def _medusa_tensors(folder: Path) -> dict[str, Tensor]:
    """Any Medusa layout's tensors under vLLM's names; a full model's backbone is not read."""
    inside = any(name.startswith("medusa_head.") for name in tensor_names(folder))
    tensors = read_tensors(folder, prefix="medusa_head." if inside else "")
    tensors = {name.removeprefix("medusa_heads."): x for name, x in tensors.items()}
    layers = _count(tensors, r"0\.(\d+)\.linear\.weight")
    named = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            name = "blocks.{}.layers.{}.{}".format(*match.groups())
        elif match := re.fullmatch(rf"(\d+)\.{layers}\.weight", name):
            name = f"lm_heads.{match[1]}.weight"
        named[name] = tensor
    return named


def _faster_name(name: str, layers: int) -> str:
    """A tensor's name in FasterDecoding's layout, from vLLM's."""
    kind, head, *rest = name.split(".")
    return f"{head}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{head}.{layers}.weight"


def _count(names: Iterable[str], pattern: str) -> int:
    """1 + the largest number that the pattern's group finds; 0 if it finds none."""
    return max((1 + int(m[1]) for name in names if (m := re.fullmatch(pattern, name))), default=0)


def _vocab_size(config: Mapping[str, Any], rows: int | None, map_: Tensor | None) -> int:
    """V of the target: as the config says; without it, whole output matrices tell."""
    if "vocab_size" in config:
        return _number(config, "vocab_size")
    if rows is not None and (map_ is None or rows > len(map_)):
        return rows
    raise UsageError("config.json does not say vocab_size", "add the target's vocabulary size")


def _draft_vocabulary(map_: Tensor | None, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Ascending ids of the draft vocabulary, and the order that sorts rows stored in the file's order. None: all."""
    if map_ is None:
        return None, None
    ids, order = map_.long().flatten().sort()
    if (
        map_.dim() != 1
        or len(ids) == 0
        or int(ids[0]) < 0
        or int(ids[-1]) >= vocab_size
        or bool((ids[1:] == ids[:-1]).any())
    ):
        raise UsageError(f"tensor {TOKEN_MAP} must hold different token ids from 0 to {vocab_size - 1}")
    return ids, order


def _rank_accuracy(config: Mapping[str, Any]) -> RankAccuracy | None:
    rows = config.get("rank_accuracy")
    return None if rows is None else tuple(tuple(float(x) for x in row) for row in rows)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"config.json says {key} = {value!r}, want a whole number from 1")
    return value


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UsageError(f"the file has no tensor {name}", f"it has {', '.join(sorted(tensors)[:4])} …")
    return tensors[name]


def _matrix(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = _tensor(tensors, name)
    if tensor.dim() != 2:
        raise UsageError(f"tensor {name} has shape {list(tensor.shape)}, want two dimensions")
    return tensor


def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise UsageError(f"tensor {name} has shape {list(tensor.shape)}, want {list(shape)}")
    if not tensor.is_floating_point():
        raise UsageError(f"tensor {name} holds {tensor.dtype}, want floating-point numbers")
    return tensor


def _fill(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Load every parameter of `module`; other tensors are ignored."""
    present = {name: x for name, x in tensors.items() if x is not None}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_shaped(name, _tensor(present, name), tuple(parameter.shape)))


def _save_ours(
    folder: Path, config: dict[str, Any], module: nn.Module, draft_ids: Tensor | None, compact: bool
) -> None:
    tensors = dict(module.state_dict())
    if draft_ids is not None:
        tensors[TOKEN_MAP] = draft_ids
    _save(folder, "model.safetensors", config, tensors, compact)


def _save(folder: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor], compact: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / file, {name: x.detach().contiguous() for name, x in tensors.items()}, int8=compact)
    text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
