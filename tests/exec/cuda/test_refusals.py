"""What a device lacks is told in one line at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kvloom.exec.cuda.device import GpuDevice, host_device
from kvloom.exec.cuda.loader import load_executor, load_gpu_executor, refuse_expandable
from kvloom.exec.cuda.operations import plain_operations
from kvloom.kernels.driver import Driver, DriverError
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return spec_of({"m": make_checkpoint(tmp_path, "qwen3")}, max_running=2)


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load()
    assert "\n" not in caught.value.message
    return caught.value.message


@NO_GPU
def test_no_gpu(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.cuda.loader.triton_operations", plain_operations)
    told = refusal(lambda: load_gpu_executor(replace(spec, device="cuda:0")))
    assert told.startswith("device: ")
    assert "`device: cpu`" in told or "CUDA cannot be used here" in told


@NO_GPU
def test_no_driver() -> None:
    with pytest.raises(DriverError, match="cuda-bindings cannot be used here"):
        Driver()


def test_a_pool_that_holds_no_page(spec: EngineSpec) -> None:
    small = replace(spec, kv_bytes=2048)
    told = refusal(lambda: load_executor(small, host_device(4), plain_operations()))
    assert told == (
        "kv_memory: 2,048 bytes, which this unit has of it, hold no page of m; "
        "at least 6,144 for each unit are needed"
    )


@pytest.mark.parametrize(("architecture", "name"), [("gpt_oss", "sinks"), ("bloom", "slopes")])
def test_scores_that_the_kernels_do_not_compute(architecture: str, name: str, tmp_path: Path) -> None:
    spec = spec_of({"m": make_checkpoint(tmp_path, architecture)}, max_running=2)
    told = refusal(lambda: load_executor(spec, host_device(4), plain_operations()))
    assert told.startswith(f"models.m: its attention has {name}, which GPU kernels do not compute")


class _Small(GpuDevice):
    """A device with little memory."""

    def free(self) -> tuple[int, int]:
        return 100_000, 4_000_000


def test_weights_that_do_not_fit(spec: EngineSpec) -> None:
    host = host_device(4)
    small = _Small(host.torch, host.compute, host.partitions)
    told = refusal(lambda: load_executor(spec, small, plain_operations()))
    assert told.startswith("models.m: its weights need ")
    assert "bytes beside a pool of 4,194,304, and 100,000 of 4,000,000 are free on cpu" in told


def test_too_little_beside_the_pool(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kvloom.exec.cuda.executor.GpuExecutor.prepare", prepare)
    told = refusal(lambda: load_executor(spec, host_device(4), plain_operations()))
    assert told.startswith(
        "kv_memory: beside a pool of 4,194,304 bytes too little of cpu is left to run jobs"
    )


def test_memory_that_peers_cannot_map() -> None:
    refuse_expandable({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    told = refusal(lambda: refuse_expandable({"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments: True"}))
    assert told.startswith("PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True; ")
