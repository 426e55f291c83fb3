"""Every kernel compiles to machine code for recent GPUs, without one: Triton brings its own assembler.

The interpreter accepts more than the compiler, so what only runs interpreted may not compile. The launchers are
called as in earnest, on CPU tensors, with the launch itself left out.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoGpu:
    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(NoGpu(int(sys.argv[1])))
run = JITFunction.run
compiled = {}


def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    assert kernel.asm["cubin"], self.__name__
    compiled.setdefault(self.__name__, 0)
    compiled[self.__name__] += 1


JITFunction.run = compile_only

from spectune.decoding.random import Stream
from spectune.kernels.accept import accept
from spectune.kernels.coins import coins
from spectune.kernels.compact import buffer_table, compact
from spectune.kernels.copy import copy, read
from spectune.kernels.match import match_greedy
from spectune.kernels.sample import sample
from spectune.kernels.tree_attention import tree_attention
from spectune.sweeping.cell import Sampling

keys = torch.zeros(3, dtype=torch.int64)
coins(keys, Stream.ACCEPT, keys, keys)
copy(torch.ones(16), torch.ones(16))
read(torch.ones(16))
for dtype, k, vocab in ((torch.float32, 0, 128256), (torch.bfloat16, 4, 49152)):
    logits, tokens = torch.zeros(3, k + 1, vocab, dtype=dtype), torch.zeros(3, k, dtype=torch.int64)
    match_greedy(logits, tokens, keys)
    for q in (None, torch.zeros(3, k, vocab)):
        accept(logits, tokens, keys, q, 1.0, keys, keys)
for dtype, sampling in (
    (torch.float32, Sampling(temperature=1.0)),
    (torch.bfloat16, Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.1)),
):
    sample(torch.zeros(3, 49152, dtype=dtype), sampling, keys, keys)
for dtype, heads, kv_heads, d, tree in (
    (torch.float32, 9, 3, 64, True), (torch.bfloat16, 32, 8, 128, False), (torch.float16, 4, 4, 48, True)
):
    cache = torch.zeros(3, kv_heads, 512, d, dtype=dtype)
    query = torch.zeros(3, heads, 5, d, dtype=dtype)
    mask = torch.ones(3, 5, 9, dtype=torch.bool) if tree else None
    depths = torch.zeros(3, 5, dtype=torch.int64) if d == 64 else None
    tree_attention(query, cache, cache, keys, mask, window=128 if d != 48 else None, depths=depths)
for dtype in (torch.float32, torch.bfloat16):
    path = torch.zeros(3, 9, dtype=torch.int64)
    compact(buffer_table([torch.zeros(3, 3, 64, 64, dtype=dtype)] * 4), keys, path, keys)
print(" ".join(sorted(compiled)))
"""


@pytest.mark.parametrize("capability", [90])
def test_every_kernel_compiles_without_a_gpu(tmp_path, capability):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = set(done.stdout.split())
    assert {"_decide_kernel", "_pass_kernel", "_attend_kernel", "_merge_kernel", "_compact_kernel"} <= kernels
