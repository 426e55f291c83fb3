"""The round clock: host time, CUDA events, and the choice between them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from spectune.measuring.clock import EventClock, HostClock, make_clock


def test_a_cpu_round_is_timed_by_the_host() -> None:
    clock = make_clock("cpu")
    assert isinstance(clock, HostClock)
    start = clock.mark()
    time.sleep(0.02)
    end = clock.mark()
    clock.sync()
    assert 0.02 <= clock.seconds(start, end) < 1.0
    assert clock.seconds(start, start) == 0.0


class FakeCuda:
    """Records the order of events and waits; an event's time is its number in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                self.at = len(cuda.log)
                cuda.log.append(f"event on {stream}")

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append(f"wait for {device}"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_cuda_round_waits_once_and_reads_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    clock = make_clock("cuda:1")
    assert isinstance(clock, EventClock)
    marks = [clock.mark() for _ in range(3)]
    clock.sync()
    assert cuda.log == ["event on cuda:1"] * 3 + ["wait for cuda:1"]
    assert clock.seconds(marks[0], marks[2]) == pytest.approx(0.002)


def test_cuda_without_an_index_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert isinstance(make_clock("cuda", "cuda:0"), EventClock)


@pytest.mark.parametrize(
    ("target", "draft", "waits"),
    [
        ("cuda:0", "cpu", {"cuda:0"}),
        ("cpu", "cuda:0", {"cuda:0"}),
        ("cuda:0", "cuda:1", {"cuda:0", "cuda:1"}),
    ],
)
def test_two_devices_are_timed_by_the_host_which_waits_for_the_gpus(
    monkeypatch: pytest.MonkeyPatch, target: str, draft: str, waits: set[str]
) -> None:
    cuda = FakeCuda(monkeypatch)
    clock = make_clock(target, draft)
    assert isinstance(clock, HostClock)
    start = clock.mark()
    assert set(cuda.log) == {f"wait for {device}" for device in waits}
    assert clock.seconds(start, clock.mark()) >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_time_real_work() -> None:
    clock = make_clock("cuda")
    big = torch.ones(1 << 24, device="cuda")
    start = clock.mark()
    big.add_(1)
    end = clock.mark()
    clock.sync()
    assert 0 < clock.seconds(start, end) < 10
