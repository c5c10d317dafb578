"""Multiprocessors split once and for all: the baseline that multiplexing is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.kernels.cuda_driver import Driver, DriverError
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.green import STEP
from kvloom.model.gpu.partitions import Lane, Partitions
from kvloom.model.gpu.streams import CudaStream, HostStream


@dataclass(frozen=True, slots=True)
class Split:
    """devices: one lane each. apart: whether they really share no multiprocessor; why not, else empty."""

    devices: list[Device]
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


def split(device: Device, weights: Sequence[float]) -> Split:
    """A part of the device for each weight, in proportion, in whole groups of STEP multiprocessors; what is
    left of them is the largest part's. Where there are no green contexts, plain streams, which share all."""
    if device.torch.type != "cuda":
        sizes = divided(device.compute, weights)
        return Split([_of(device, Lane(size, HostStream())) for size in sizes])
    try:
        return Split([_of(device, lane) for lane in _green(device.torch, weights)])
    except DriverError as error:
        sizes = [STEP * part for part in divided(device.compute // STEP, weights)]
        lanes = [Lane(size, CudaStream.new(device.torch)) for size in sizes]
        return Split([_of(device, lane) for lane in lanes], f"no green contexts: {error}")


def _of(device: Device, lane: Lane) -> Device:
    return Device(device.torch, lane.compute, Partitions(lane, []))


def _green(device: torch.device, weights: Sequence[float]) -> list[Lane]:
    """CUDA's driver API, cuDevResourceGenerateDesc: groups of one split may be joined again. The contexts
    live as long as the process. Raises DriverError."""
    driver = Driver()
    driver.enter(device.index)
    api, number = driver.api, driver("cuDeviceGet", device.index)
    everything = driver("cuDeviceGetDevResource", number, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    most = int(everything.sm.smCount) // STEP
    groups, made, rest = driver("cuDevSmResourceSplitByCount", most, everything, 0, STEP)
    free = list(groups[: int(made)])
    parts = divided(len(free), weights)
    lanes = []
    for part in parts:
        mine, free = free[:part], free[part:]
        if part == max(parts) and rest is not None and int(rest.sm.smCount):
            mine, rest = [*mine, rest], None
        description = driver("cuDevResourceGenerateDesc", mine, len(mine))
        flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = driver("cuGreenCtxCreate", description, number, flags)
        kind = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = driver("cuGreenCtxStreamCreate", context, kind, 0)
        wrapped = CudaStream(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
        lanes.append(Lane(sum(int(one.sm.smCount) for one in mine), wrapped))
    return lanes
