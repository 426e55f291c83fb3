"""Matrix products with weights laid out for the processor.

oneDNN reads a weight in its own blocked order much faster than in rows (1.3 to 3 times here for 1 to 16 rows of input,
bit for bit the same in bfloat16), so on a CPU weights are reordered once at load. Elsewhere this is a plain linear.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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
