"""What is asked of CUDA's driver, by a driver that only writes it down, and what is never recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvloom.exec.cuda.device import GpuDevice, HostStream, PartitionLane, Partitions, Recording
from kvloom.exec.cuda.loader import load_executor
from kvloom.exec.cuda.operations import plain_operations
from kvloom.kernels.driver import BEYOND_BINDINGS, OLDEST_BINDINGS, Driver, DriverError
from tests.bindings import requirements
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of


def test_a_thread_gets_the_primary_context_each_time_and_it_is_retained_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def call(name: str, result: list[object]) -> Callable[..., tuple[object, ...]]:
        def run(*given: object) -> tuple[object, ...]:
            asked.append((name, *given))
            return 0, *result

        return run

    results: dict[str, list[object]] = {
        "cuInit": [],
        "cuDeviceGet": [70],
        "cuDevicePrimaryCtxRetain": ["context"],
        "cuCtxSetCurrent": [],
    }
    api = SimpleNamespace(**{name: call(name, result) for name, result in results.items()})
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", api)
    driver = Driver()
    driver.enter(1)
    driver.enter(1)
    retained = [("cuDeviceGet", 1), ("cuDevicePrimaryCtxRetain", 70)]
    assert asked == [("cuInit", 0), *retained, *[("cuCtxSetCurrent", "context")] * 2]
    with pytest.raises(DriverError, match="have no cuGreenCtxCreate"):
        driver("cuGreenCtxCreate")


@pytest.mark.parametrize(
    ("found", "right"), [("12.8.0", False), ("12.9.0", True), ("13.5.0", True), ("14.0.0", False)]
)
def test_bindings_that_are_too_old_or_too_new_are_told_of(
    found: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.kernels.driver.version", lambda name: found)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimpleNamespace(cuInit=lambda flags: (0,)))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(__path__=[]))
    if right:
        Driver()
        return
    with pytest.raises(
        DriverError, match=f"cuda-bindings {found} are not known here; 12.9 or newer, below 14"
    ):
        Driver()


def test_the_bindings_that_are_known_are_those_that_are_asked_for() -> None:
    oldest = ".".join(map(str, OLDEST_BINDINGS))
    assert f">={oldest},<{BEYOND_BINDINGS[0]}" in requirements()["newest"]


class _Recorder(HostStream):
    """Does the work while it records."""

    def record(self, work: Callable[[], None]) -> Recording:
        work()
        return super().record(work)


def test_no_memory_is_given_back_while_a_lane_records() -> None:
    """torch's allocator refuses that, whichever stream records."""
    begun, done = threading.Event(), threading.Event()
    pair = PartitionLane(2, _Recorder()), PartitionLane(2, HostStream())
    lanes = Partitions(PartitionLane(4, HostStream()), [pair])
    device = GpuDevice(torch.device("cpu"), 4, lanes)

    def trim() -> None:
        begun.set()
        device.trim()
        done.set()

    def work() -> None:
        thread.start()
        begun.wait()
        assert not done.wait(0.02)

    thread = threading.Thread(target=trim)
    pair[0].record(work)
    thread.join()
    assert done.is_set()


class _Counted(HostStream):
    recorded = 0

    def record(self, work: Callable[[], None]) -> Recording:
        self.recorded += 1
        return super().record(work)


@dataclass(frozen=True, slots=True)
class _Asking(GpuDevice):
    """Its steps always wait for it."""

    @contextmanager
    def unasked(self) -> Iterator[None]:
        yield
        raise RuntimeError("called a synchronizing CUDA operation")


def test_a_model_whose_steps_wait_for_the_device_is_not_tried_to_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, half = _Counted(), _Counted()
    pair = PartitionLane(2, half), PartitionLane(2, half)
    device = _Asking(torch.device("cpu"), 4, Partitions(PartitionLane(4, whole), [pair]))
    spec = spec_of({"m": make_checkpoint(tmp_path, "llama", num_hidden_layers=1)}, max_running=2)
    load_executor(spec, device, plain_operations()).close()
    assert whole.recorded == half.recorded == 0
    assert caplog.text.count("runs without graphs: called a synchronizing CUDA operation") == 1
