"""Where kernel tests run: on a GPU as compiled kernels, without one in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="with a GPU, kernels are compiled, not interpreted")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
