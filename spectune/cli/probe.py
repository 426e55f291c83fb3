"""`spectune probe`: the memory bandwidth that this device really reaches."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from spectune.errors import SpectuneError

if TYPE_CHECKING:
    from spectune.measuring.probe import Probe
    from spectune.sweeping.cell import Reading


def probe(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure how fast this device streams memory: the ceiling of plain decoding.

    Example: spectune probe --device cpu
    """
    from spectune.measuring.device import resolve_device
    from spectune.measuring.probe import run_probe

    try:
        measured = run_probe(resolve_device(device))
    except RuntimeError as error:  # torch's errors, out of memory among them
        raise SpectuneError(f"the copy benchmark failed: {error}", "free memory on the device") from error
    if as_json:
        print(json.dumps(_as_fields(measured), indent=2))
    else:
        _print_table(measured)


def _as_fields(measured: Probe) -> dict[str, object]:
    bandwidth = measured.bandwidth
    return {
        "device": bandwidth.device,
        "buffer_bytes": bandwidth.buffer_bytes,
        "peak_bytes_per_second": measured.achievable.model_dump(),
        "copy_bytes_per_second": bandwidth.copy_bytes_per_second,
        "read_bytes_per_second": bandwidth.read_bytes_per_second,
        "derived_bytes_per_second": measured.derived.model_dump(),
        "achievable_of_derived": measured.share_of_derived.model_dump(),
        "streams": [{**asdict(r), "bytes_per_second": r.bytes_per_second} for r in bandwidth.rates],
        "clocks": {name: reading.model_dump() for name, reading in measured.clocks.items()},
        "throttle_reasons": measured.throttle_reasons,
        "notes": list(bandwidth.notes),
    }


def _print_table(measured: Probe) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    bandwidth = measured.bandwidth
    table = Table("fact", "value", box=box.SIMPLE_HEAD)
    table.add_row("device", bandwidth.device)
    for rate in bandwidth.rates:
        counted = "reads + writes" if rate.writes else "reads"
        table.add_row(rate.method, f"{rate.bytes_per_second / 1e9:.1f} GB/s ({counted}, {len(rate.seconds)} runs)")
    table.add_row("achievable peak", f"{bandwidth.bytes_per_second / 1e9:.1f} GB/s ({bandwidth.best.method})")
    table.add_row("derived peak", _show(measured.derived, 1e-9, "GB/s"))
    table.add_row("achievable / derived", _show(measured.share_of_derived, 100, "%"))
    for name, reading in measured.clocks.items():
        table.add_row(name.replace("_", " "), _show(reading, 1, ""))
    if measured.throttle_reasons is not None:
        table.add_row("throttle reasons", ", ".join(measured.throttle_reasons) or "none seen")
    for note in bandwidth.notes:
        table.add_row("note", note)
    Console(markup=False).print(table)


def _show(reading: Reading, scale: float, unit: str) -> str:
    if reading.value is None:
        return f"n/a: {reading.reason}"
    return f"{reading.value * scale:.1f} {unit}".rstrip()
