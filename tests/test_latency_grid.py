"""The latency grid times the decoder's own forward, at every place that fits the context."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from spectune.errors import UsageError
from spectune.measuring import latency_grid
from spectune.measuring.latency_grid import Grid, measure_grid
from spectune.speedup.surface import fit_surface

SMALL = Grid(rows=(1, 3), queries=(1, 4), contexts=(16, 64, 252))


def test_every_place_that_fits_is_timed_and_the_others_are_not(tiny):
    points = measure_grid(tiny.model, SMALL, repeats=2)
    places = [p.place for p in points]
    assert sorted(places) == sorted(SMALL.places(tiny.model.max_context))
    assert (1, 4, 252) in places  # 256 positions
    assert len(places) == 12
    assert all(p.seconds > 0 for p in points)


def test_forwards_have_the_shape_of_their_place(tiny, monkeypatch):
    seen = []
    forward = tiny.model.forward

    def watch(ids, step, store, **options):
        seen.append((*ids.shape, step.starts[0]))
        assert store.rows == ids.shape[0]
        return forward(ids, step, store, **options)

    monkeypatch.setattr(tiny.model, "forward", watch)
    measure_grid(tiny.model, SMALL, repeats=2)
    for place in SMALL.places(tiny.model.max_context):
        assert seen.count(place) == 3  # once to warm up


def test_more_rows_and_longer_drafts_take_longer_and_the_points_can_be_fitted(tiny):
    grid = Grid(rows=(1, 8), queries=(1, 8, 64), contexts=(16, 64, 128))
    points = measure_grid(tiny.model, grid, repeats=3)
    seconds = {p.place: p.seconds for p in points}
    assert seconds[8, 64, 16] > seconds[1, 1, 16]
    assert fit_surface(points).best is not None


def test_a_grid_beyond_the_context_is_refused():
    with pytest.raises(UsageError, match="no place of the latency grid fits a context of 8"):
        Grid(contexts=(64,)).places(8)


def test_the_command_writes_points_and_fit(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(latency_grid, "Grid", lambda: SMALL)
    app = latency_grid.typer.Typer()
    app.command()(latency_grid.main)
    done = CliRunner().invoke(app, [str(tiny_folder), "-o", str(tmp_path / "grid.json"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "grid.json").read_text())
    assert json.loads(done.stdout) == written
    assert len(written["points"]) == 12
    assert {"best", "tried", "points", "reason"} == set(written["fit"])
