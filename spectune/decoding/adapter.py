"""The only module that touches transformers' model classes: loading, attention, cache and layer subsets.

A model runs through three official extension points: a registered attention function, a `CacheLayerMixin`
subclass, and explicit `position_ids`. That is enough for batches whose rows have different lengths.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from spectune.decoding import fused
from spectune.decoding.cache import KVStore, Step
from spectune.errors import UsageError

ATTENTION = "spectune_rows"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    spectune_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the per-row cache.

    Args:
        query: [B, heads, q, head_dim]; key, value: [B, kv_heads, length, head_dim].
        sliding_window, softcap, s_aux: what a model's own layers ask for (window, logit cap, attention sinks).
        spectune_step: where the queries stand; passed through the model's forward.

    Returns:
        [B, q, heads, head_dim]
    """
    if spectune_step is None:
        raise UsageError(
            f"{type(module).__name__} does not pass attention arguments through",
            "this architecture cannot be decoded by spectune yet",
        )
    if softcap is None and s_aux is None:
        return attend_rows(query, key, value, spectune_step, scaling, sliding_window), None
    return _attend_plainly(query, key, value, spectune_step.mask(sliding_window), scaling, softcap, s_aux), None


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, step: Step, scaling: float | None, window: int | None
) -> Tensor:
    """Plain scaled dot-product attention of a step. Shapes as in `attend`."""
    if step.is_fresh_prefill and (window is None or step.query <= window):
        grouped = query.shape[1] != key.shape[1]
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    if (fused_out := fused.attend(query, key, value, step, scaling, window)) is not None:
        return fused_out
    # The query heads that share a key head become further queries of it: the keys are read once, and the kernel does
    # not expand them, which on a CPU costs several times the attention itself.
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, -1, groups * width, size),
        key,
        value,
        attn_mask=step.mask(window, groups),
        scale=scaling,
    )
    return out.reshape(rows, heads, width, -1).transpose(1, 2)


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a logit cap or sinks, which the fused kernels lack. Shapes as in `attend`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)).float() * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.float()], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2)


AttentionInterface.register(ATTENTION, attend)


class _RowLayer(CacheLayerMixin):
    """One layer's door into the KVStore."""

    def __init__(self, owner: RowCache, layer: int) -> None:
        super().__init__()
        self.owner = owner
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.owner.store.write(self.layer, key_states, value_states, self.owner.step)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        pass

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.owner.step.length, 0

    def get_seq_length(self) -> int:
        starts = self.owner.step.starts
        return min(starts) if isinstance(starts, tuple) else 0

    def get_max_length(self) -> int:
        return self.owner.store.capacity

    get_max_cache_shape = get_max_length


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache over a KVStore. `step` is set before every forward."""

    store: KVStore
    step: Step

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_RowLayer(self, i) for i in range(layers)])


class CausalModel:
    """A causal language model that reads and writes a KVStore."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        config = model.config.get_text_config()
        self.config = config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.layers_count: int = config.num_hidden_layers
        self.max_context: int = min(
            getattr(config, "max_position_embeddings", None) or 1 << 20, _constant_rope_context(config)
        )
        # Layer indices stay those of the full model even when only some layers run.
        self.cache = RowCache(1 + max(layer_numbers(model)))
        # 5.24 renamed the argument; older versions know it as past_key_values.
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def forward(self, ids: Tensor, step: Step, store: KVStore, *, last_only: bool = False) -> Tensor:
        """Run new tokens through the model and the cache.

        Args:
            ids: [B, q] token ids on the model's device.
            last_only: return the logits of the last place only.

        Returns:
            [B, q or 1, V] logits in the model's dtype.
        """
        return self._run(ids, step, store, last_only=last_only).logits

    def forward_with_states(
        self, ids: Tensor, step: Step, store: KVStore, taps: tuple[int, ...], *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the residual stream at the taps.

        Args:
            taps: layer numbers, ascending: i is what enters layer i, the number of layers what the output head reads
                (after the final norm).

        Returns:
            logits [B, q or 1, V], states [B, q, len(taps) * hidden] in the model's dtype.
        """
        output = self._run(ids, step, store, last_only=last_only, output_hidden_states=True)
        return output.logits, torch.cat([output.hidden_states[tap] for tap in taps], -1)

    def _run(self, ids: Tensor, step: Step, store: KVStore, *, last_only: bool, **options: Any) -> Any:
        self.cache.store, self.cache.step = store, step
        # Padding behind a row's real tokens may reach past the context; its position must still be a legal one.
        positions = step.positions.clamp(max=self.max_context - 1)
        arguments = {self._cache_argument: self.cache}
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            spectune_step=step,
            return_dict=True,
            **arguments,
            **options,
        )
        # The model outlives the run; its cache must not.
        self.cache.store = KVStore(0, 0)
        return output

    @property
    def embedding(self) -> Any:
        """Tensor [V, h] of input embeddings."""
        module: Any = self.model.get_input_embeddings()
        return module.weight.detach()

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """[n, h] rows of the output head, in the order of `ids`; all without."""
        weight = self.model.get_output_embeddings().weight.detach()
        return weight if ids is None else weight[ids.to(weight.device)]

    def subset(self, layers: Sequence[int]) -> CausalModel:
        """The same weights with only some decoder layers, in order; the cache layers keep their numbers.

        Raises:
            UsageError: a layer number that the model does not have, or nothing left to run.
        """
        stack = layer_stack(self.model)
        wanted = list(layers)
        if not wanted or wanted != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= len(stack):
            raise UsageError(f"layers {wanted} do not fit a model of {len(stack)} layers (0 to {len(stack) - 1})")
        model = _shallow(self.model)
        base = _shallow(self.model.base_model)
        setattr(model, self.model.base_model_prefix, base)
        config = copy.copy(base.config)
        config.num_hidden_layers = len(wanted)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in wanted]
        base.config = config
        for name, child in self.model.base_model.named_children():
            if child is stack:
                setattr(base, name, nn.ModuleList(stack[i] for i in wanted))
        return CausalModel(model, self.device)


def _constant_rope_context(config: Any) -> int:
    """Positions up to which the rotary frequencies are constant.

    LongRoPE and dynamic scaling change all frequencies with the longest position of a forward: beyond the original
    context a row's result would depend on its batch mates and cached keys would be stale.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "dynamic"):
        return 1 << 30
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(original or config.max_position_embeddings)


def _shallow(module: nn.Module) -> Any:
    """A copy whose children can be replaced without touching the original; parameters are shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers. Raises UsageError where there is not exactly one plain list."""
    count = model.config.get_text_config().num_hidden_layers
    for child in model.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UsageError(
        f"{type(model).__name__} keeps its layers in an unknown place",
        "early exit and layer skip need one plain list of decoder layers",
    )


def layer_numbers(model: PreTrainedModel) -> set[int]:
    """Numbers in the cache of the layers that a model runs."""
    found = (getattr(module, "layer_idx", None) for module in model.modules())
    return {index for index in found if isinstance(index, int)}
