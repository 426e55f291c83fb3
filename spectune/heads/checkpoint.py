"""Read and write the files of draft heads, and tell which family a folder holds.

Safetensors are preferred; pickles are read with `weights_only`, which runs no code from the file.

Small files: `save_tensors(int8=True)` stores each matrix `X` as int8 with a float companion `X_scale` [rows, 1];
`read_tensors` multiplies them out again. Published formats know nothing of this: other programs cannot read such files.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectune.errors import SpectuneError, UsageError

Family = Literal["eagle", "eagle3", "medusa", "blockwise", "mlp-speculator", "exit", "layer-skip", "causal-lm"]

_SCALE = "_scale"
# In the order of preference; an index names several files.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)
_OWN_FORMATS = {"blockwise", "exit", "layer-skip"}
# Families that work in ways the decoder does not have: how their names appear in a config, and what they are called.
_REFUSED = {
    "dflash": "DFlash",
    "peagle": "P-EAGLE",
    "hydra": "Hydra",
    "mtp": "MTP",
    "dspark": "DSpark",
    "domino": "Domino",
}


@contextmanager
def making_head(folder: Path) -> Iterator[None]:
    """While a head is made of a folder's files: a config or tensors that make no sense together raise anything, which
    becomes a UsageError."""
    try:
        yield
    except (SpectuneError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise UsageError(
            f"no head can be made of {folder}: {first_line}", "its files are damaged or do not belong together"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UsageError: missing or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} has no config.json", "name a folder with a draft head or a draft model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}", "the file is damaged; fetch the head again") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object", "the file is damaged; fetch the head again")
    return config


def read_eps(config: Mapping[str, Any], default: float) -> float:
    """What a norm adds to the mean square. Raises UsageError for what is no small number."""
    value = config.get("rms_norm_eps", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UsageError(f"config.json says rms_norm_eps = {value!r}", "the file is damaged; fetch the head again")
    return float(value)


def read_tensors(folder: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a folder on the CPU, in the types they are stored in; int8 matrices with a scale are multiplied out.

    Args:
        prefix: read only names that start with it, and cut it off.

    Raises:
        UsageError: no weights, a damaged file, a pickle with more than tensors in it, or an index that points outside.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors |= _read_safetensors(path, prefix) if path.suffix == ".safetensors" else _read_pickle(path, prefix)
    return _multiply_out(tensors)


def tensor_names(folder: Path) -> set[str]:
    """Names of the folder's tensors. Raises as `read_tensors`."""
    names: set[str] = set()
    for path in _weight_files(folder):
        if path.suffix == ".safetensors":
            with _open_safetensors(path) as file:
                names |= set(file.keys())
        else:
            names |= _read_pickle(path, "").keys()
    return names


def detect_family(folder: Path) -> Family:
    """Which kind of draft a folder holds.

    Raises:
        UsageError: a family that spectune does not have (named), nothing known, or unreadable files.
    """
    config = read_config(folder)
    if own := config.get("spectune_head"):
        if own not in _OWN_FORMATS:
            raise UsageError(f"{folder} holds a {own!r} head", f"this version knows {', '.join(sorted(_OWN_FORMATS))}")
        return _family(own)
    speculators_type = str(config.get("speculators_model_type") or "").lower()
    model_type = str(config.get("model_type") or "").lower()
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    _refuse_by_config(folder, config, f"{speculators_type} {model_type} {architectures}")
    if model_type == "medusa" or "medusa_num_heads" in config or any(folder.glob("medusa_lm_head.*")):
        return "medusa"
    if "mlp_speculator" in (model_type, speculators_type):
        return "mlp-speculator"
    if speculators_type and speculators_type not in ("eagle", "eagle3"):
        raise UsageError(f"{folder} holds a {speculators_type!r} head", "spectune has no such drafter")
    names = {name.removeprefix("model.") for name in tensor_names(folder)}
    if "mask_hidden" in names:
        raise _refusal(folder, "P-EAGLE")
    if names and all(name.startswith("mtp.") for name in names):
        raise _refusal(folder, "MTP")
    if any(name.startswith("medusa_head.") for name in names):  # inside a full model
        return "medusa"
    if speculators_type:
        return _family(speculators_type)
    if "eagle3" in architectures or any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in names):
        return "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle"
    if "embed_tokens.weight" in names or "causallm" in architectures or "lmhead" in architectures:
        return "causal-lm"
    raise UsageError(
        f"{folder} holds neither a draft head nor a language model that spectune knows",
        "known are EAGLE, EAGLE-3, Medusa and MLP speculator heads, heads from `spectune train`, and causal models",
    )


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, int8: bool = False) -> None:
    """Write a safetensors file; a kill leaves the old file or the new one.

    Args:
        int8: store floating-point matrices as int8 with one scale per row (largest error half a step, 1/254 of the
            row's largest weight).
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if int8 and tensor.dim() == 2 and tensor.is_floating_point():
            scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            stored[name] = (tensor.float() / scale).round().to(torch.int8)
            stored[name + _SCALE] = scale
        else:
            stored[name] = tensor
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.touch()
    mode = scratch.stat().st_mode
    save_file(stored, scratch, metadata={"format": "pt"})
    scratch.chmod(mode)  # safetensors leaves a file that its owner alone may read
    os.replace(scratch, path)


def _family(name: str) -> Family:
    assert name in get_args(Family)
    return name  # type: ignore[return-value]


def _refusal(folder: Path, family: str) -> UsageError:
    return UsageError(
        f"{folder} holds a {family} head, which spectune cannot run",
        "supported are EAGLE, EAGLE-3, Medusa, blockwise and MLP speculator heads",
    )


def _refuse_by_config(folder: Path, config: Mapping[str, Any], described: str) -> None:
    for key, family in _REFUSED.items():
        if key in described.replace("_", "") or f"{key}_config" in config or f"{key}_num_heads" in config:
            raise _refusal(folder, family)
    if any(folder.glob("hydra_lm_head*")):
        raise _refusal(folder, "Hydra")


def _weight_files(folder: Path) -> list[Path]:
    for name in _WEIGHT_FILES:
        if (path := folder / name).is_file():
            return _files_of_index(path) if path.suffix == ".json" else [path]
    raise UsageError(f"{folder} holds no weights", f"wanted one of {', '.join(_WEIGHT_FILES)}")


def _files_of_index(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read {path}", "the file is damaged; fetch the head again") from error
    for name in names:
        # Whoever wrote the index must not make us read other files of this machine.
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise UsageError(f"{path} names {name!r}, which is not a file in its own folder", "do not use this head")
        if not (path.parent / name).is_file():
            raise UsageError(f"{path} names {name}, which is missing", "fetch the head again")
    return [path.parent / name for name in names]


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    with _open_safetensors(path) as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (it is no mapping)
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def _read_pickle(path: Path, prefix: str) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors and could run code of its author", "convert it to safetensors first"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise _damaged(path, error) from error
    if not isinstance(content, dict) or not all(
        isinstance(t, Tensor) and isinstance(n, str) for n, t in content.items()
    ):
        raise UsageError(f"{path} is no table of tensors", "wanted a state dict")
    return {name.removeprefix(prefix): tensor for name, tensor in content.items() if name.startswith(prefix)}


def _damaged(path: Path, error: Exception) -> UsageError:
    first_line = str(error).strip().split("\n")[0]
    return UsageError(f"cannot read {path}: {first_line}", "the file is damaged; fetch the head again")


def _multiply_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name + _SCALE)
        if tensor.dtype == torch.int8 and scale is not None:
            if scale.shape != (tensor.shape[0], 1):
                raise UsageError(
                    f"{name}{_SCALE} has shape {list(scale.shape)}, wanted {[tensor.shape[0], 1]}",
                    "the file is damaged; fetch the head again",
                )
            whole[name] = tensor.to(scale.dtype) * scale
        elif not (name.endswith(_SCALE) and _is_int8(tensors.get(name.removesuffix(_SCALE)))):
            whole[name] = tensor
    for name, tensor in whole.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UsageError(f"tensor {name} holds what is no number", "the file is damaged; fetch the head again")
    return whole


def _is_int8(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int8
