"""The device as a model's loader sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from kvloom.core.errors import ConfigError
from kvloom.core.geometry import Geometry
from kvloom.model.attention import Scoring
from kvloom.model.forward import Forward
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.fusing import fuse_on_device
from kvloom.model.gpu.operations import Operations

_HALVES: Final = ("bfloat16", "float16")


class DeviceTarget:
    """Weights go from the mapped files straight to the device, each once; a rank's slices lie there."""

    def __init__(self, device: Device, operations: Operations) -> None:
        self._device = device
        self._operations = operations

    def dtype(self, config: Any) -> torch.dtype:
        """The checkpoint's own where that is a half precision, bfloat16 else."""
        if self._device.torch.type == "cpu":
            return torch.float32
        own = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return getattr(torch, own) if own in _HALVES else torch.bfloat16

    def place(self, module: nn.Module) -> None:
        tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
        coming = [one for one in tensors.values() if one.device.type == "cpu"]
        needed = sum(one.numel() * one.itemsize for one in coming)
        free, total = self._device.free()
        if needed > free:
            raise ConfigError(
                f"its weights need {needed:,} bytes, and {free:,} of {total:,} are free on "
                f"{self._device.torch}; a smaller model, a half precision or a larger device is right"
            )
        module.to(self._device.torch)

    def fuse(self, module: nn.Module) -> None:
        fuse_on_device(module, self._operations)

    def settle(self, module: nn.Module) -> None:
        self._device.trim()

    def straighten(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        """transformers' modules cost nothing in a recording."""
        return None
