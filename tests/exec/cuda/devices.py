"""The CPU in a GPU's place."""

from __future__ import annotations

import torch

from kvloom.exec.cuda.device import DeviceStream, GpuDevice, HostStream, PartitionLane, Partitions

COMPUTE = 8


def one_lane(stream: DeviceStream | None = None, device: type[GpuDevice] = GpuDevice) -> GpuDevice:
    """Returns a device without partitions, whose jobs run on `stream`."""
    whole = PartitionLane(COMPUTE, stream or HostStream())
    return device(torch.device("cpu"), COMPUTE, Partitions(whole, []))
