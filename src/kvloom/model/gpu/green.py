"""Complementary green contexts: two streams that together have all multiprocessors, and share none.

CUDA's driver API, section "Green Contexts" (12.4 and later). A partition keeps its own work off the others'
multiprocessors, not theirs off its own: streams of the primary context run everywhere, and L2 and the
memory's bandwidth are shared. So jobs that run at the same time are both put into partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvloom.kernels.cuda_driver import Driver, DriverError
from kvloom.model.gpu.streams import CudaStream, Stream

_log = logging.getLogger(__name__)

PARTS: Final = (1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of the multiprocessors, for the smaller side of each pair
STEP: Final = 8  # Hopper's: partitions have a multiple of it

Side = tuple[int, Stream]


def cut_green(device: torch.device, count: int, parts: Sequence[float] = PARTS) -> list[tuple[Side, Side]]:
    """Pairs of a device with `count` multiprocessors, one for each of `parts`; where the driver or its
    bindings cannot make them, one pair of plain streams, which share all, and a line in the log."""
    try:
        driver = Driver()
        driver.enter(device.index)
        sizes = sorted({max(STEP, round(count * part / STEP) * STEP) for part in parts})
        return [_pair(driver, device, size) for size in sizes if size < count]
    except DriverError as error:
        _log.warning(
            "no green contexts, so jobs that run at the same time share all of %s: %s", device, error
        )
        half = max(1, count // 2)
        first, second = (CudaStream.new(device) for _ in range(2))
        return [((half, first), (count - half, second))]


def _pair(driver: Driver, device: torch.device, size: int) -> tuple[Side, Side]:
    """At least `size` multiprocessors, and the rest."""
    api = driver.api
    number = driver("cuDeviceGet", device.index)
    everything = driver("cuDeviceGetDevResource", number, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, _, rest = driver("cuDevSmResourceSplitByCount", 1, everything, 0, size)
    first, second = (_side(driver, device, number, part) for part in (groups[0], rest))
    return first, second


def _side(driver: Driver, device: torch.device, number: Any, resource: Any) -> Side:
    """The contexts are never destroyed: they live as long as the process, as the streams do."""
    api = driver.api
    description = driver("cuDevResourceGenerateDesc", [resource], 1)
    flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    context = driver("cuGreenCtxCreate", description, number, flags)
    flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stream = driver("cuGreenCtxStreamCreate", context, flags, 0)
    wrapped = CudaStream(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
    try_out(wrapped, device)
    return int(resource.sm.smCount), wrapped


def try_out(stream: CudaStream, device: torch.device) -> None:
    """Raises DriverError where work and events of the primary context, as torch makes them, do not go into
    the stream."""
    try:
        with stream.entered():
            torch.zeros(1, device=device)
        stream.mark().wait()
    except RuntimeError as error:
        raise DriverError(f"their streams take no work: {' '.join(str(error).split())[:200]}") from error
