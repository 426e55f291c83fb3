"""Writing results: what is named with -o is written whole, or said not to be."""

from __future__ import annotations

import os
import stat

import pytest
from synthetic_run import cell, write_run

from spectune.errors import SpectuneError, UsageError
from spectune.reporting.store import write


@pytest.mark.parametrize("name", [".", "", "/", "..", "folder", "nowhere/file"])
def test_what_is_no_file_is_an_error_and_no_traceback(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpectuneError, match="cannot write"):
        write(type(tmp_path)(name), "text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_link_stays_and_what_it_names_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    link, file = tmp_path / "link", tmp_path / "real" / "file"
    file.write_text("old")
    link.symlink_to(file)
    write(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "text")
        assert os.read(reader, 100) == b"text"
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


def test_a_path_that_is_no_utf8_may_be_in_the_text(tmp_path):
    write(tmp_path / "file", "run \udcff")
    assert (tmp_path / "file").read_text() == "run ?"


def test_what_a_sweep_measured_is_never_written_over(tmp_path):
    run = write_run(tmp_path / "run", [cell()])
    (measured,) = (run / "cells").glob("*.json")
    for path in (run / "run.json", measured):
        before = path.read_bytes()
        with pytest.raises(UsageError, match="part of a run"):
            write(path, "text")
        assert path.read_bytes() == before
    (run / "figures").mkdir()
    write(run / "figures" / "a.svg", "text")
    write(run / "figures" / "a.svg", "again")
    write(run / "report.html", "text")
    write(run / "report.html", "again")
    assert (run / "report.html").read_text() == "again"
