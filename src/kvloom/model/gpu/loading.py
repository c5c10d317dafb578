"""An executor for a unit whose device is a GPU, ready to run jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

import torch

from kvloom.core.errors import ConfigError
from kvloom.core.spec import EngineSpec
from kvloom.model.gpu.arena import DeviceArena
from kvloom.model.gpu.device import Device, cuda_device
from kvloom.model.gpu.executor import GpuExecutor
from kvloom.model.gpu.green import cut_green
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.operations import Operations, triton_operations
from kvloom.model.gpu.target import DeviceTarget
from kvloom.model.loader import LoadedModel, load_models

WORKING: Final = 0.1  # of the device's memory, which `kv_memory: auto` leaves to what jobs compute with
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def load_gpu_executor(spec: EngineSpec, progress: Callable[[str], None] = lambda _: None) -> GpuExecutor:
    """Raises ConfigError with what the device lacks."""
    refuse_expandable(os.environ)
    try:
        operations = triton_operations()
    except ImportError as error:
        raise ConfigError(
            f"device: Triton cannot be used here ({error}); pip install 'kvloom[gpu]', "
            "or `device: cpu`, is right"
        ) from error
    progress(f"opening {spec.device}")
    device = cuda_device(int(spec.device.partition(":")[2] or 0), cut_green)
    return load_executor(spec, device, operations, progress)


def load_executor(
    spec: EngineSpec, device: Device, operations: Operations, progress: Callable[[str], None] = lambda _: None
) -> GpuExecutor:
    """Load every model, then take the pool, then rehearse. Raises ConfigError."""
    device.enter()
    loaded = load_models(spec.models, spec.block_bytes, progress, target=DeviceTarget(device, operations))
    progress("taking the KV arena")
    size = spec.kv_bytes or _rest(device)
    arena = DeviceArena(_blocks(loaded, size, spec.block_bytes), spec.block_bytes, device.torch)
    models = {name: DeviceModel.place(model, arena, operations) for name, model in loaded.items()}
    executor = GpuExecutor(models, arena, device)
    try:
        executor.prepare(most_running=spec.max_running, chunk=spec.chunk_tokens, progress=progress)
    except torch.OutOfMemoryError as error:
        free, total = device.free()
        raise ConfigError(
            f"kv_memory: beside a pool of {size:,} bytes too little of {device.torch} is left to run jobs "
            f"({free:,} of {total:,} bytes); a smaller kv_memory, chunk_tokens or max_running is right"
        ) from error
    return executor


def refuse_expandable(environment: Mapping[str, str]) -> None:
    """Peers cannot map what torch allocates in expandable segments."""
    for name in _SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ConfigError(
                f"{name}: expandable_segments:True; without it is right, for peers map the KV arena"
            )


def _rest(device: Device) -> int:
    """Bytes for the pool where the config leaves them open."""
    free, total = device.free()
    rest = free - int(WORKING * total)
    if rest <= 0:
        raise ConfigError(
            f"kv_memory: the weights leave {free:,} of {device.torch}'s {total:,} bytes, too little for "
            "a pool; fewer or smaller models are right"
        )
    return rest


def _blocks(models: Mapping[str, LoadedModel], size: int, block_bytes: int) -> int:
    """Raises ConfigError where so many bytes hold no page of a model."""
    blocks = size // block_bytes
    for name, model in models.items():
        if model.geometry.blocks_per_page > blocks:
            raise ConfigError(
                f"kv_memory: {size:,} bytes hold no page of {name}; "
                f"at least {model.geometry.blocks_per_page * block_bytes:,} are needed"
            )
    return blocks
