"""The baseline file: what is written reads back, and what cannot be read is refused with the way out."""

from __future__ import annotations

import json

import pytest
from gate_helpers import accepting, side, timed_cell
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import spec, strict_json

from spectune.errors import UsageError
from spectune.gating.baseline import Baseline, Cell, PassTimes, RequestCounts, Times, baseline_text, read_baseline

SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def cells(draw, k):
    size, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    counts = st.lists(
        st.tuples(st.integers(0, k), st.integers(1, 50)).flatmap(
            lambda dn: st.tuples(st.just(dn[0]), st.integers(0, dn[0]), st.just(dn[1]))
        ),
        max_size=3,
    ).map(tuple)
    requests = [
        RequestCounts(
            id=draw(st.text(min_size=1, max_size=8)) + str(n),
            prompt=draw(st.text(max_size=8)),
            output_digest=draw(st.text("0123456789abcdef", min_size=4, max_size=16)),
            output_tokens=draw(st.integers(1, 500)),
            counts=draw(counts),
        )
        for n in range(size)
    ]

    def passes():
        def row(values):
            return tuple(draw(st.lists(values, min_size=size, max_size=size)))

        return tuple(
            PassTimes(
                tokens=row(st.integers(0, 99)),
                seconds=row(SECONDS),
                ttft_seconds=row(SECONDS),
                tpot_seconds=row(st.none() | SECONDS),
            )
            for _ in range(repeats)
        )

    return Cell(
        spec=spec(k=k, drafter=draw(st.text(max_size=12))),
        output_check=draw(st.sampled_from(["identical", "numeric ties", "different", None])),
        repeatable=draw(st.booleans()),
        no_speed=draw(st.none() | st.text(max_size=20)),
        target_forwards=draw(st.integers(0, 1000)),
        requests=tuple(requests),
        times=draw(st.none() | st.builds(Times, plain=st.just(passes()), speculative=st.just(passes()))),
    )


@st.composite
def baselines(draw):
    return Baseline(
        run=draw(st.text(max_size=20)),
        created_at="2026-01-01T00:00:00+00:00",
        spectune_version="0",
        hardware={"cpu": draw(st.text(max_size=20)), "cpu_flags": ["a", "b"], "wsl": None},
        software={"torch": draw(st.none() | st.text(max_size=10))},
        cells=tuple(draw(cells(k)) for k in draw(st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True))),
    )


@given(baselines())
def test_a_baseline_reads_back_as_it_was_written(tmp_path_factory, baseline):
    path = tmp_path_factory.mktemp("b") / "baseline.json"
    path.write_text(baseline_text(baseline), encoding="utf-8")
    assert read_baseline(path) == baseline
    strict_json(path.read_text(encoding="utf-8"))


def test_the_file_has_a_line_per_cell_and_neither_failures_nor_absolute_paths(tmp_path):
    base = side(tmp_path / "run", timed_cell(2.0), timed_cell(1.5, drafter="ngram", drafter_digest="none"))
    text = baseline_text(base)
    assert sum(line.startswith('  {"spec"') for line in text.splitlines()) == 2
    assert str(tmp_path) not in text
    assert "failures" not in json.loads(text)


def test_without_times_the_counts_stay(tmp_path, spectune):
    from synthetic_run import write_run

    run = write_run(tmp_path / "run", [timed_cell(2.0)])
    assert spectune("baseline", run, "-o", tmp_path / "all.json")[0] == 0
    assert spectune("baseline", run, "-o", tmp_path / "exact.json", "--exact-only")[0] == 0
    everything, exact = read_baseline(tmp_path / "all.json"), read_baseline(tmp_path / "exact.json")
    assert exact.cells[0].times is None
    assert exact.cells[0].requests == everything.cells[0].requests
    assert (tmp_path / "exact.json").stat().st_size < (tmp_path / "all.json").stat().st_size


@pytest.fixture
def text(tmp_path):
    return baseline_text(side(tmp_path / "run", accepting((4, 2), (4, 4))))


def test_a_file_cut_anywhere_is_refused(tmp_path, text):
    path = tmp_path / "cut.json"
    for end in (0, 1, len(text) // 3, len(text) // 2, len(text) - 3):
        path.write_text(text[:end])
        with pytest.raises(UsageError, match=r"is not a baseline.*spectune baseline RUN -o"):
            read_baseline(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=2), "schema version 2"),
        (lambda d: d.update(kind="other"), "kind"),
        (lambda d: d.update(cells=[]), "holds no cell"),
        (lambda d: d["cells"].append(d["cells"][0]), "two cells are the same"),
        (lambda d: d["cells"][0]["times"]["plain"].pop(), "not paired"),
        (lambda d: d["cells"][0]["times"]["plain"][0]["seconds"].pop(), "one time for each request"),
        (lambda d: d["cells"][0]["requests"][0]["counts"][0].__setitem__(1, 9), "accepted more"),
        (lambda d: d["cells"][0].update(requests=[]), "requests"),
        (lambda d: d["cells"][0]["times"]["plain"][0]["seconds"].__setitem__(0, float("nan")), "seconds"),
        (lambda d: d["cells"][0]["times"]["plain"][0]["seconds"].__setitem__(0, None), "seconds"),
    ],
)
def test_a_file_changed_by_hand_is_refused(tmp_path, text, change, message):
    document = json.loads(text)
    change(document)
    (tmp_path / "b.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=message):
        read_baseline(tmp_path / "b.json")


def test_missing_files_and_directories_are_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="there is no baseline"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is a directory"):
        read_baseline(tmp_path)
