"""Timing a model's forward over a small grid of rows, new tokens and context: what a latency surface is fitted to.

    python -m spectune.measuring.latency_grid [MODEL] [-o FILE]

The forward is the decoder's own, on its own cache. Every place is warmed at its own shape, then the places are walked
several times in an order that changes, so that a drift of the machine's speed falls on all of them; the median of a
place's times counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from spectune.errors import SpectuneError, UsageError
from spectune.speedup.surface import Point, SurfaceFit, fit_surface
from spectune.sweeping.atomic import write_atomically

if TYPE_CHECKING:
    from spectune.decoding.adapter import CausalModel


@dataclass(frozen=True, slots=True)
class Grid:
    """The places: every combination of `rows`, `queries` and `contexts` that the model's context holds."""

    rows: tuple[int, ...] = (1, 4, 16)
    queries: tuple[int, ...] = (1, 2, 5, 9)
    contexts: tuple[int, ...] = (64, 256, 1024)

    def places(self, max_context: int) -> list[tuple[int, int, int]]:
        """(B, q, ctx). Raises UsageError where none fits."""
        found = [(b, q, c) for b, q, c in product(self.rows, self.queries, self.contexts) if c + q <= max_context]
        if not found:
            raise UsageError(f"no place of the latency grid fits a context of {max_context}", "use shorter contexts")
        return found


def measure_grid(model: CausalModel, grid: Grid, *, repeats: int = 5) -> list[Point]:
    """Time one forward at every place of the grid, `repeats` times each; what the cache holds does not matter."""
    import torch

    from spectune.decoding.cache import KVStore, Step
    from spectune.measuring.clock import make_clock

    places = grid.places(model.max_context)
    clock = make_clock(model.device)
    seconds: dict[tuple[int, int, int], list[float]] = {place: [] for place in places}
    order = random.Random(0)
    with torch.inference_mode():
        for rows in grid.rows:
            inside = [place for place in places if place[0] == rows]
            # One cache for all places of this many rows.
            store = KVStore(rows, max((q + c for _, q, c in inside), default=0))

            def forward(place: tuple[int, int, int], store: KVStore = store) -> float:
                _, query, context = place
                ids = torch.zeros(place[0], query, dtype=torch.long, device=model.device)
                start = clock.mark()
                model.forward(ids, Step(0, (context,) * place[0], query, model.device), store)
                end = clock.mark()
                clock.sync()
                return clock.seconds(start, end)

            for place in inside:
                forward(place)
            for _ in range(repeats):
                for place in order.sample(inside, len(inside)):
                    seconds[place].append(forward(place))
    return [Point(*place, median(times)) for place, times in seconds.items()]


def document(name: str, points: Sequence[Point], found: SurfaceFit) -> str:
    """The points and what was fitted to them, as strict JSON."""
    content = {"model": name, "points": [asdict(p) for p in points], "fit": asdict(found)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def main(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")] = "smollm2",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the points and the fit, as JSON.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Measure a model's latency surface and print what was fitted."""
    from spectune.decoding.loading import load, pick_device, pick_dtype

    try:
        where = pick_device(device)
        loaded = load(model, device=where, dtype=pick_dtype(dtype, where))
        points = measure_grid(loaded.model, Grid())
        text = document(loaded.info.name, points, fit_surface(points))
        if output is not None:
            write_atomically(output, text + "\n")
    except SpectuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
