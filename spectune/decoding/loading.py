"""Load models and tokenizers, and check that target and draft fit each other."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from spectune.decoding.adapter import ATTENTION, CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.demo import DEMO_NAME, demo_folder
from spectune.decoding.grown import PREFIX as GROWN
from spectune.decoding.grown import grow, parse_grown
from spectune.decoding.hash_tokenizer import HashTokenizer
from spectune.decoding.lean import lean
from spectune.decoding.random_weights import random_source
from spectune.decoding.shapes import PREFIX as SHAPE
from spectune.decoding.source import Source
from spectune.errors import SpectuneError, UsageError
from spectune.sweeping.cell import ModelInfo, Sampling

_SAMPLE_BYTES = 1 << 20
_RECURRENT_LAYERS = {"linear_attention", "mamba", "recurrent", "conv", "mamba2", "gated_deltanet"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode, with what the analysis must know about it."""

    model: CausalModel
    tokenizer: Any | None  # None where the folder has none
    info: ModelInfo
    stop_ids: frozenset[int]
    defaults: Sampling  # the model's own generation config


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that exists here."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}", "use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {name!r} needs CUDA, which torch does not find here", "use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {name!r} does not exist; there are {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise UsageError(f"device {name!r} is not supported", "use cpu or cuda")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it fast, else float32."""
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return torch.bfloat16 if torch.backends.mkldnn.is_available() and _cpu_has_fast_bf16() else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise UsageError(f"unknown dtype {name!r}", f"use auto, {', '.join(dtypes)}")
    return dtypes[name]


def _cpu_has_fast_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a causal language model from a folder, the hub, or the demo package (`smollm2`), or make one.

    `shape:…` has random weights of a given shape, `grown:…` is a draft with further layers.

    Raises:
        UsageError: no such model, not a causal language model, or an architecture the decoder cannot run.
    """
    source = _source(name, device, dtype, {"revision": revision, "trust_remote_code": trust_remote_code})
    causal = lean(CausalModel(source.model, device))
    kv_bytes = _check_decodes(name, causal)
    return Loaded(
        model=causal,
        tokenizer=source.tokenizer,
        info=_info(name, source, causal, kv_bytes),
        # Random weights stop at random: an output's length would say nothing.
        stop_ids=frozenset() if source.weights == "random" else _stop_ids(source.model),
        defaults=Sampling() if source.weights == "random" else _defaults(source.model),
    )


def load_original(name: str, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights as `load` gives, a copy of their own, with transformers' attention and forward.

    Raises:
        UsageError: no such model, or not a causal language model.
    """
    model = _source(name, device, dtype, {"revision": None, "trust_remote_code": False}).model
    model.set_attn_implementation("sdpa")
    return model


def _source(name: str, device: torch.device, dtype: torch.dtype, hub: dict[str, Any]) -> Source:
    if name.startswith(GROWN):
        wanted = parse_grown(name)
        return grow(name, _source(wanted.draft, device, dtype, hub), wanted.layers, wanted.epsilon)
    if name.startswith(SHAPE):
        source = random_source(name, device=device, dtype=dtype)
        _refuse_recurrent(name, source.model.config)
        return source
    return _pretrained(name, device, dtype, hub)


def _pretrained(name: str, device: torch.device, dtype: torch.dtype, hub: dict[str, Any]) -> Source:
    where = str(demo_folder()) if name == DEMO_NAME else name
    if where.startswith((".", "/", "~")):
        where = str(Path(where).expanduser())
        if not Path(where).is_dir():
            raise UsageError(f"no model folder at {name}", "name a folder with config.json, or a hub id")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries say nothing the error will not
    try:
        config = AutoConfig.from_pretrained(where, **hub)
        _refuse_recurrent(name, config)
        model = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, attn_implementation=ATTENTION, **hub
        )
    except (SpectuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a damaged file or a foreign architecture raises, the model is at fault
        first_line = str(error).strip().split("\n")[0]
        raise UsageError(
            f"cannot load {name!r}: {first_line}", "check the name; without a network, name a model folder instead"
        ) from error
    model = model.eval().requires_grad_(False).to(device)
    return Source(model, _tokenizer(where, hub), digest_of(where, config), "trained")


def _tokenizer(where: str, hub: dict[str, Any]) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(where, **hub)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _refuse_recurrent(name: str, config: Any) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name!r} is an encoder-decoder model", "spectune decodes causal language models")
    if recurrent := _RECURRENT_LAYERS & set(getattr(text, "layer_types", None) or ()):
        raise UsageError(
            f"{name!r} has {', '.join(sorted(recurrent))} layers, whose state cannot be rolled back",
            "choose a target with attention layers only",
        )


def _check_decodes(name: str, causal: CausalModel) -> int:
    """Refuse a model that does not give the same logits in pieces as in one go. Returns its KV bytes per token.

    A recurrent state or an attention that ignores the registered function shows here, before anything is measured.
    """
    size = min(8, causal.max_context)
    ids = (torch.arange(size, device=causal.device) * 7 + 3)[None] % causal.vocab_size
    cut = size // 2
    whole, pieces = KVStore(1, size), KVStore(1, size)
    with torch.inference_mode():
        expected = causal.forward(ids, Step(0, (0,), size, causal.device), whole)
        if not whole.keys:
            raise UsageError(f"{name!r} keeps no keys and values that can be rolled back")
        causal.forward(ids[:, :cut], Step(0, (0,), cut, causal.device), pieces)
        actual = causal.forward(ids[:, cut:], Step(0, (cut,), size - cut, causal.device), pieces)
    expected, actual = expected[:, cut:].float(), actual.float()
    scale = expected.std().clamp(min=1e-6)
    if not torch.isfinite(expected).all():
        raise UsageError(f"{name!r} produces NaN or infinite logits in {causal.model.dtype}", "try --dtype float32")
    if ((expected - actual).abs().mean() / scale).item() > 0.1:
        raise UsageError(f"{name!r} does not decode step by step as it does in one go; its cache is not supported")
    return whole.bytes_per_token()


def _info(name: str, source: Source, causal: CausalModel, kv_bytes: int) -> ModelInfo:
    return ModelInfo(
        name=name,
        digest=source.digest,
        parameters=sum(p.numel() for p in source.model.parameters()),
        weight_bytes_per_step=weight_bytes_per_step(source.model),
        kv_bytes_per_token=kv_bytes,
        layers=causal.config.num_hidden_layers,
        vocab_size=causal.vocab_size,
        max_context=causal.max_context,
        dtype=str(causal.model.dtype).removeprefix("torch."),
        device=str(causal.device),
        weights=source.weights,
        activation_bytes_per_token=activation_bytes_per_token(causal),
    )


def activation_bytes_per_token(causal: CausalModel) -> int:
    """Bytes that the widest point of a layer holds for one token: what enters the MLP, and its inner values.

    Of a mixture of experts only the chosen experts count.
    """
    config = causal.config
    inner = getattr(config, "intermediate_size", None) or 4 * causal.hidden_size
    if chosen := getattr(config, "num_experts_per_tok", None):
        inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
    # Residual, normalised and output; gate and up as one product, the activation, and their product.
    return int((3 * causal.hidden_size + 4 * inner) * causal.model.dtype.itemsize)


def weight_bytes_per_step(model: PreTrainedModel) -> int:
    """Bytes of weights one forward of few tokens reads.

    Input embeddings are looked up row by row and left out, unless they are also the output head. Of a mixture of
    experts only the chosen experts count.
    """
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    share = chosen / experts if experts else 1.0
    head = model.get_output_embeddings()
    looked_up = {id(p) for p in model.get_input_embeddings().parameters()} - {id(p) for p in head.parameters()}
    total = 0.0
    for parameter_name, p in model.named_parameters():
        if id(p) not in looked_up:
            total += p.numel() * p.element_size() * (share if ".experts." in parameter_name else 1.0)
    return int(total)


def digest_of(where: str | Path, config: Any = None) -> str:
    """Pins the weights: the hub's commit, or a hash over a local folder's files (ends of the large ones)."""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)[:16]
    digest = hashlib.sha256()
    for path in sorted(Path(where).glob("*")):
        if path.suffix in {".safetensors", ".bin", ".json", ".model", ".pt"}:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """The generation config's end-of-sequence ids, one or a list."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def _defaults(model: PreTrainedModel) -> Sampling:
    """Sampling of the model's own generation config; greedy where it does not ask for sampling."""
    config = model.generation_config
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    if config is None or not getattr(config, "do_sample", False):
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
    )


def shared_vocabulary(target: Loaded, draft: Loaded) -> int:
    """How many ids both models give the same meaning: drafts stay below this.

    Vocabularies may be padded to different widths; the tokenizers must agree on every id.

    Raises:
        UsageError: the tokenizers differ; names the first differing id.
    """
    width = min(target.model.vocab_size, draft.model.vocab_size)
    tokenizers = [t for t in (target.tokenizer, draft.tokenizer) if t is not None and not isinstance(t, HashTokenizer)]
    if len(tokenizers) < 2:
        if target.model.vocab_size != draft.model.vocab_size:
            raise UsageError(
                f"cannot tell whether {draft.info.name!r} uses the tokenizer of {target.info.name!r}: their "
                f"vocabularies have {draft.model.vocab_size} and {target.model.vocab_size} tokens",
                "put the tokenizer files beside both models, or choose shapes of one family",
            )
        return width
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in tokenizers)
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise UsageError(
                f"{draft.info.name!r} has another tokenizer than {target.info.name!r}: id {i} is "
                f"{theirs.get(i)!r} there and {ours.get(i)!r} in the target",
                "choose a draft of the same model family",
            )
    return min(width, 1 + max(ours))
