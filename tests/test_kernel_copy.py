"""The copy and read kernels against their plain-torch references.

Without a GPU they run in Triton's interpreter, which has to be chosen before triton is first imported; so the
cases run in a process of their own, and each test looks at one case's outcome.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

SIZES = [0, 1, 4095, 4096, 4097, 10_000]  # the block is 4096
DTYPES = ["float32", "float16", "int64"]

SCRIPT = """
import json, sys
import torch
from spectune.kernels.copy import BLOCK, copy, copy_reference, read, read_reference

device, sizes, dtypes = json.loads(sys.argv[1])
outcomes = {"block": BLOCK}
for size in sizes:
    for name in dtypes:
        dtype = getattr(torch, name)
        src = torch.randint(-8, 9, (size,), generator=torch.Generator().manual_seed(size)).to(device, dtype)
        # One element more on both sides shows a store outside the buffer.
        room = torch.full((size + 2,), 77, dtype=dtype, device=device)
        copy(src, room[1:-1])
        expected = copy_reference(src, torch.empty_like(src))
        outcomes[f"copy {size} {name}"] = bool(
            torch.equal(room[1:-1], expected) and room[0] == 77 and room[-1] == 77
        )
        if dtype.is_floating_point:
            # Small whole numbers: their sums are exact in any order.
            outcomes[f"read {size} {name}"] = torch.equal(read(src), read_reference(src))

def refusal(function, *tensors):
    try:
        function(*tensors)
    except AssertionError as error:
        return str(error)

one, grid = torch.ones(4, device=device), torch.ones(4, 4, device=device)
outcomes["sizes"] = refusal(copy, one, torch.ones(5, device=device))
outcomes["dtypes"] = refusal(copy, one, one.half())
outcomes["layout"] = refusal(copy, grid.T[:2], grid.T[:2])
outcomes["integers"] = refusal(read, one.int())
print(json.dumps(outcomes))
"""


def outcomes_on(device: str) -> dict[str, object]:
    environment = dict(os.environ)
    environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([device, SIZES, DTYPES])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    return outcomes_on("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_copy_writes_every_element_and_nothing_else(interpreted: dict[str, object], size: int, dtype: str) -> None:
    assert interpreted[f"copy {size} {dtype}"] is True


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_read_sums_each_block(interpreted: dict[str, object], size: int, dtype: str) -> None:
    assert interpreted[f"read {size} {dtype}"] is True


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("sizes", "sizes differ: 4 and 5"),
        ("dtypes", "dtypes differ: torch.float32 and torch.float16"),
        ("layout", "copy needs a contiguous source"),
        ("integers", "read sums floating-point values, not torch.int32"),
    ],
)
def test_a_wrong_tensor_is_refused_with_the_reason(interpreted: dict[str, object], case: str, message: str) -> None:
    assert interpreted[case] == message


def test_sizes_around_the_block_are_covered(interpreted: dict[str, object]) -> None:
    block = interpreted["block"]
    assert isinstance(block, int)
    assert {block - 1, block, block + 1} <= set(SIZES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_kernels_agree_too() -> None:
    outcomes = outcomes_on("cuda")
    assert all(value is True for name, value in outcomes.items() if name.startswith(("copy", "read")))
