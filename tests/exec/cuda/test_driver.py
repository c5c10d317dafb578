"""What is asked of CUDA's driver, by a driver that only writes it down, and what is never recorded."""

from __future__ import annotations

import sys
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
from kvloom.kernels.driver import Driver, DriverError
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
    assert caplog.text.count("decodes without graphs: called a synchronizing CUDA operation") == 1
