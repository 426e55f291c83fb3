"""Computations that are recorded once and run again from the same buffers.

On CUDA a recording is a graph: one launch instead of hundreds, so that small steps are bound by memory and not by
Python. A graph reads and writes fixed addresses and cannot ask the host anything. What is recorded is therefore a
function of tensors, given a dictionary of inputs whose first dimension is the batch:

    outputs = graphs.run("verify", function, {"tokens": ..., "counts": ...})

Inputs are copied into buffers made for the whole batch, whatever the number of rows at work; outputs live until the
same computation runs again. Function, input shapes and presence decide which recording is run.

On a CPU the same buffers are used and the function itself is called, with every operation refused that would make a
GPU wait for the host: mistakes of shape, aliasing or synchronisation show without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spectune.decoding.cache import KVStore

Tensors = Mapping[str, Tensor | None]
Function = Callable[[dict[str, Any]], Mapping[str, Any]]

_WARM_UP = 2  # runs before a capture: the first use of a kernel compiles, allocates and tunes


class Graphs:
    """The recordings of one decoder on one device, and the caches whose addresses they hold.

    Args:
        rows: B, the most rows at work.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.rows = rows
        self.captures = 0  # so far; whoever measures makes sure that none falls into a measured window
        self.bytes = 0  # that the graphs' own buffers take on the device
        self.unrecorded: dict[Hashable, str] = {}  # computations that cannot be recorded, and why
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._stores: dict[str, KVStore] = {}

    def run(self, name: Hashable, function: Function, inputs: Tensors) -> dict[str, Any]:
        """Run a computation on some inputs, [b, ...] each; the outputs are cut to b rows.

        The function must do the same to the same inputs however often it runs, and must not keep what it is given.
        """
        key = name, tuple((k, None if x is None else (x.shape[1:], x.dtype)) for k, x in inputs.items())
        if key not in self._recordings:
            self.captures += 1
            kind = _CudaGraph if self.device.type == "cuda" else _Twin
            try:
                recording = kind(self, function, inputs)
                outputs = recording.run(inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the model itself asks the host something: the computation is called then
                self.unrecorded[name] = str(error).splitlines()[0]
                self._recordings[key] = None
            else:
                self._recordings[key] = recording
                return outputs
        known = self._recordings[key]
        return dict(function(dict(inputs))) if known is None else known.run(inputs)

    def store(self, name: str, rows: int, capacity: int) -> KVStore:
        """A cache that outlives a run, so that recordings keep their addresses; a longer one forgets them all."""
        store = self._stores.get(name)
        if store is None or store.rows != rows or store.capacity < capacity:
            self.forget()
            store = self._stores[name] = KVStore(rows, capacity)
        return store

    def forget(self) -> None:
        """Drop all recordings: some address has changed."""
        self._recordings.clear()


class HostCopy:
    """A tensor on its way to the host, while the device goes on with other work."""

    def __init__(self, x: Tensor) -> None:
        self._event: Any = None
        self._copy = x
        if x.is_cuda:
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(x.device))

    def rows(self) -> list[list[int]]:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class _Recording(ABC):
    """Buffers of a computation."""

    def __init__(self, owner: Graphs, function: Function, inputs: Tensors) -> None:
        self.function = function
        self.inputs: dict[str, Tensor | None] = {
            name: None if x is None else torch.zeros(owner.rows, *x.shape[1:], dtype=x.dtype, device=owner.device)
            for name, x in inputs.items()
        }
        self.outputs: dict[str, Tensor | None] = {}
        self.fill(inputs)

    def fill(self, inputs: Tensors) -> int:
        """Copy the inputs in; the number of rows. What other rows hold is left over from rounds before."""
        rows = 0
        for name, x in inputs.items():
            buffer = self.inputs[name]
            if x is not None and buffer is not None:
                rows = len(x)
                buffer[:rows].copy_(x, non_blocking=True)
        return rows

    def run(self, inputs: Tensors) -> dict[str, Tensor | None]:
        rows = self.fill(inputs)
        self.replay()
        return {name: None if x is None else x[:rows] for name, x in self.outputs.items()}

    @abstractmethod
    def replay(self) -> None:
        """Compute the outputs from what the buffers hold."""


class _CudaGraph(_Recording):
    def __init__(self, owner: Graphs, function: Function, inputs: Tensors) -> None:
        super().__init__(owner, function, inputs)
        before = torch.cuda.memory_reserved(owner.device)
        side = torch.cuda.Stream(owner.device)
        side.wait_stream(torch.cuda.current_stream(owner.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                function(self.inputs)
        torch.cuda.current_stream(owner.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # A memory pool of its own: in a shared one a graph's scratch may lie where another's outputs live.
        with torch.cuda.graph(self.graph):
            self.outputs = dict(function(self.inputs))
        owner.bytes += max(0, torch.cuda.memory_reserved(owner.device) - before)

    def replay(self) -> None:
        self.graph.replay()


class _Twin(_Recording):
    """Runs the function, into outputs that keep their place and forget what they held."""

    def replay(self) -> None:
        for x in self.outputs.values():
            if x is not None:
                x.fill_(-1 if not x.is_floating_point() else torch.nan)
        with NoSynchronization(), NoReading():
            new = self.function(self.inputs)
        for name, x in new.items():
            old = self.outputs.get(name)
            if x is None or old is None or old.shape != x.shape:
                self.outputs[name] = None if x is None else x.clone()
            else:
                old.copy_(x)


class NoSynchronization(TorchDispatchMode):
    """Refuses operations for which a GPU would have to wait for the host, or the host for a GPU."""

    _REFUSED = (
        "aten::lift_fresh",  # torch.tensor(...): a copy from the host
        "aten::nonzero",
        "aten::masked_select",
        "aten::equal",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::repeat_interleave.Tensor",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(self._REFUSED) or (name.startswith("aten::index") and _by_mask(args)):
            raise RuntimeError(f"{name} makes the device and the host wait for each other")
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Refuses what reads a tensor on the host and is no operation to a dispatcher, in inference mode at the latest."""

    _REFUSED = frozenset(
        ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._REFUSED:
            raise RuntimeError(f"{func.__name__} makes the device and the host wait for each other")
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    """Whether an index is a boolean mask, whose size only the device knows."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
