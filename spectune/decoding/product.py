"""Matrix products with weights laid out for the processor.

oneDNN reads a weight in its own blocked order much faster than in rows (1.3 to 3 times here for 1 to 16 rows of input,
bit for bit the same in bfloat16), so on a CPU weights are reordered once at load. Elsewhere this is a plain linear.

A drafter's products may round: `Int8Product` reads a quarter of what float32 does.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.errors import UsageError

_SMALLEST = 1e-12  # scale of a row of zeros
_TYPICAL_ROWS = 16  # the layout is chosen for about this many rows: a verification or a small batch


class Product:
    """x -> x @ weight.T + bias.

    Args:
        weight: [n, k]; with several modules their weights stacked, for products of the same input.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        packed = _pack(weight)
        self.is_packed = packed is not None
        self.weight = weight if packed is None else packed

    def __call__(self, x: Tensor) -> Tensor:
        """[..., k] -> [..., n]."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def int8(self) -> Int8Product:
        """The same product with a copy of the weight in 8 bits. Raises UsageError where there is no such product."""
        return Int8Product(self.weight.to_dense() if self.is_packed else self.weight, self.bias)

    @classmethod
    def of(cls, *modules: nn.Linear) -> Product:
        """One product for modules that share their input.

        Where the weight keeps its layout, the modules become views of the product's: nothing is held twice.
        """
        if len(modules) == 1:
            return cls(modules[0].weight, modules[0].bias)
        bias = None if modules[0].bias is None else torch.cat([m.bias for m in modules])
        product = cls(torch.cat([m.weight for m in modules]), bias)
        if not product.is_packed:
            parts = product.weight.split([m.weight.shape[0] for m in modules])
            for module, part in zip(modules, parts, strict=True):
                module.weight = nn.Parameter(part, requires_grad=False)
        return product


class Int8Product(Product):
    """x -> x @ weight.T + bias, with 8 bits for each weight and 7 for each input.

    A weight's row is scaled by its largest value, and so is every row of the input, so that rows of a batch do not
    round each other's.

    Args:
        weight: [n, k] on a CPU.

    Raises:
        UsageError: the weight is elsewhere, or this torch has no such product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.device.type != "cpu":
            raise UsageError(
                f"int8 drafts run on a CPU, not on {weight.device}", "leave int8: out, or sweep with --device cpu"
            )
        self.bias = bias
        self.weight = weight.new_empty(0)
        self.is_packed = True
        self._packed = _pack_int8(weight.float())

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.float()  # float16 has no room for the scale of a row of zeros
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)
        # 7 bits: without VNNI, the sum of two products of 8 bits would not fit into the 16 it is given.
        y = (torch.ops.quantized.linear_dynamic(rows / scale, self._packed, True) * scale).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def int8(self) -> Int8Product:
        return self


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order, or None where that cannot be had or does not compute the same."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        result = torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return None  # built without oneDNN, or an operator of another version
    expected = functional.linear(probe, weight)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    close = torch.allclose(result, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    return packed if close else None


def _pack_int8(weight: Tensor) -> Any:
    """A float32 weight in the order of torch's int8 products."""
    scale = weight.abs().amax(1).clamp(min=_SMALLEST) / 127
    probe = torch.linspace(-1, 1, weight.shape[1])[None]
    probe[:, ::2] = 1  # its sum is not 0, so that neither are the sums of even rows
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to move quantized tensors to another package
            zeros = torch.zeros(len(weight), dtype=torch.long)
            rounded = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(rounded, None)
        result = torch.ops.quantized.linear_dynamic(probe, packed, True)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise UsageError("this torch has no int8 products", "leave int8: out") from error
    expected = functional.linear(probe, weight)
    # Rounding takes a few percent, or more where single weights stand out; anything wrong takes all.
    if not (result - expected).norm() <= expected.norm() / 4 + weight.norm() / 20:
        raise UsageError("this torch's int8 products are wrong", "leave int8: out")
    return packed
