"""Multiprocessors split once and for all: the baseline that multiplexing is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from kvloom.exec.cuda.device import (
    STEP,
    CudaStream,
    GpuDevice,
    HostStream,
    PartitionLane,
    Partitions,
    try_out,
)
from kvloom.exec.cuda.operations import triton_operations
from kvloom.kernels.driver import Driver, DriverError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """devices: one lane each. why: they may share multiprocessors all the same; else empty."""

    devices: list[GpuDevice]
    why: str = ""


def divided(whole: int, weights: Sequence[float]) -> list[int]:
    """`whole` parts in proportion to `weights`, at least one each; who is furthest below its due gets the
    next one."""
    parts = [1] * len(weights)
    if whole < len(parts):
        raise ValueError(f"want at least {len(parts)} parts, got {whole}")
    for _ in range(whole - len(parts)):
        due = [weight / part for weight, part in zip(weights, parts, strict=True)]
        parts[due.index(max(due))] += 1
    return parts


def split(device: GpuDevice, weights: Sequence[float]) -> Split:
    """A part of the device for each weight, in proportion, in whole groups of STEP multiprocessors; what is
    left of them is the largest part's. Where there are no green contexts, plain streams, which share all."""
    if device.torch.type != "cuda":
        sizes = divided(device.compute, weights)
        return Split([_of(device, PartitionLane(size, HostStream())) for size in sizes])
    try:
        return Split([_of(device, lane) for lane in _green(device.torch, weights)])
    except DriverError as error:
        sizes = [STEP * part for part in divided(device.compute // STEP, weights)]
        lanes = [PartitionLane(size, CudaStream.new(device.torch)) for size in sizes]
        return Split([_of(device, lane) for lane in lanes], f"no green contexts: {error}")


def _of(device: GpuDevice, lane: PartitionLane) -> GpuDevice:
    return GpuDevice(device.torch, lane.compute, Partitions(lane, []))


def shared_out(groups: Sequence[T], weights: Sequence[float]) -> list[list[T]]:
    """Each group to one of them, in proportion."""
    ends = list(accumulate(divided(len(groups), weights), initial=0))
    return [list(groups[first:end]) for first, end in pairwise(ends)]


def _green(device: torch.device, weights: Sequence[float]) -> list[PartitionLane]:
    """CUDA's driver API, cuDevResourceGenerateDesc: groups of one split may be joined again. What is left of
    the split goes to the largest part where the driver joins that, too. Raises DriverError."""
    driver = Driver()
    driver.enter(device.index)
    number = driver("cuDeviceGet", device.index)
    kind = driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    everything = driver("cuDeviceGetDevResource", number, kind)
    most = int(everything.sm.smCount) // STEP
    groups, made, rest = driver("cuDevSmResourceSplitByCount", most, everything, 0, STEP)
    parts = shared_out(groups[: int(made)], weights)
    lanes = []
    for part in parts:
        if len(part) == max(map(len, parts)) and rest is not None and int(rest.sm.smCount):
            with suppress(DriverError):
                lanes.append(_lane(driver, device, number, [*part, rest]))
                rest = None
                continue
        lanes.append(_lane(driver, device, number, part))
    return lanes


def _lane(driver: Driver, device: torch.device, number: Any, resources: list[Any]) -> PartitionLane:
    """Its context lives as long as the process. Raises DriverError, also where the stream takes no work."""
    api = driver.api
    description = driver("cuDevResourceGenerateDesc", resources, len(resources))
    flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    context = driver("cuGreenCtxCreate", description, number, flags)
    flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stream = driver("cuGreenCtxStreamCreate", context, flags, 0)
    wrapped = CudaStream(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
    try_out(driver, wrapped, device, triton_operations())
    return PartitionLane(sum(int(one.sm.smCount) for one in resources), wrapped)
