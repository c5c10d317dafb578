"""The device of a unit: finds it, checks whether it can be used, and holds its memory, its streams and its
partitions.

A stream is a queue of work: CUDA's, or the host's, which does work at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvloom.exec.cuda.operations import Operations
from kvloom.exec.cuda.trial import Trial, why_no_launch
from kvloom.kernels.driver import Driver, DriverError
from kvloom.types.errors import ConfigError

_log = logging.getLogger(__name__)


class StreamEvent(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Waits until the work before it is done; other threads run meanwhile."""


class Recording(Protocol):
    """Work that was recorded once, over the same tensors."""

    def replay(self) -> None:
        """Does the work again on the current stream."""


class DeviceStream(Protocol):
    def entered(self) -> AbstractContextManager[object]:
        """Sends all work that this thread asks for meanwhile to this stream."""

    def mark(self) -> StreamEvent: ...

    def follow(self, mark: StreamEvent) -> None:
        """Makes later work of this stream wait, on the device, for the work before `mark`."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Records `work`, which must have run on this stream before, so that nothing is compiled or loaded on
        the way. Raises RuntimeError if it cannot be recorded, for it asks the device something."""


class HostEvent:
    def wait(self) -> None:
        """Does nothing: the work is done."""


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class HostStream:
    """The host: a recording is the work itself, done again over the same tensors."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> HostEvent:
        return HostEvent()

    def follow(self, mark: StreamEvent) -> None:
        mark.wait()

    def record(self, work: Callable[[], None]) -> Recording:
        return _Again(work)


class CudaStreamEvent:
    """A CUDA event. A thread that waits for it sleeps: there are more threads that wait than cores to spin
    on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A CUDA stream. Its recordings share a pool of memory; they run one after the other."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @classmethod
    def new(cls, device: torch.device) -> CudaStream:
        return cls(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> CudaStreamEvent:
        return CudaStreamEvent(self.stream)

    def follow(self, mark: StreamEvent) -> None:
        if isinstance(mark, CudaStreamEvent):
            self.stream.wait_event(mark.event)
        else:
            mark.wait()

    def record(self, work: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        if not self._recordings:  # torch takes no pool again whose recordings are all gone
            self._pool = torch.cuda.graph_pool_handle()
        with self.entered():
            self.stream.synchronize()
            # other threads of this process have nothing to do with the device while graphs are made, but
            # transports' have: only what this one asks for may spoil the recording
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._recordings.add(graph)
        return graph


Side = tuple[int, DeviceStream]  # with its multiprocessors
Cut = Callable[[torch.device, int, Operations], Sequence[tuple[Side, Side]]]


PARTS: Final = (1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of the multiprocessors, for the smaller side of each pair
STEP: Final = 8  # Hopper's: partitions have a multiple of it


def cut_green(
    device: torch.device, count: int, operations: Operations, parts: Sequence[float] = PARTS
) -> list[tuple[Side, Side]]:
    """Returns pairs of a device with `count` multiprocessors, one for each of `parts`; if the driver or its
    bindings cannot make them, or their streams do not run what lanes are asked for, one pair of plain
    streams, which share all, and logs so."""
    try:
        driver = Driver()
        driver.enter(device.index)
        sizes = sorted({max(STEP, round(count * part / STEP) * STEP) for part in parts})
        return [_pair(driver, device, size, operations) for size in sizes if size < count]
    except DriverError as error:
        _log.warning(
            "no green contexts, so jobs that run at the same time share all of %s: %s", device, error
        )
        half = max(1, count // 2)
        first, second = (CudaStream.new(device) for _ in range(2))
        return [((half, first), (count - half, second))]


def _pair(driver: Driver, device: torch.device, size: int, operations: Operations) -> tuple[Side, Side]:
    """Returns resources of at least `size` multiprocessors, and of the rest."""
    api = driver.api
    number = driver("cuDeviceGet", device.index)
    everything = driver("cuDeviceGetDevResource", number, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, made, rest = driver("cuDevSmResourceSplitByCount", 1, everything, 0, size)
    if not int(made):
        raise DriverError(f"cuDevSmResourceSplitByCount: no group of {size} multiprocessors")
    first, second = (_side(driver, device, number, part, operations) for part in (groups[0], rest))
    return first, second


def _side(driver: Driver, device: torch.device, number: Any, resource: Any, operations: Operations) -> Side:
    """Returns the stream of a side. The contexts are never destroyed: they live as long as the process, as
    the streams do."""
    api = driver.api
    description = driver("cuDevResourceGenerateDesc", [resource], 1)
    flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    context = driver("cuGreenCtxCreate", description, number, flags)
    flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stream = driver("cuGreenCtxStreamCreate", context, flags, 0)
    wrapped = CudaStream(torch.cuda.ExternalStream(int(stream), device))  # type: ignore[no-untyped-call]
    try_out(driver, wrapped, device, operations)
    return int(resource.sm.smCount), wrapped


def try_out(driver: Driver, stream: CudaStream, device: torch.device, operations: Operations) -> None:
    """Raises DriverError if kernels of the primary context, Triton's, cuBLAS' and torch's own, do not run in
    the stream, live and recorded."""
    try:
        with stream.entered():
            trial = Trial(device, operations)
            trial.ask()
            trial.check()
            trial.record(driver, stream.stream.cuda_stream)
            trial.check()
        stream.mark().wait()
    except RuntimeError as error:
        raise DriverError(f"their streams do not work: {' '.join(str(error).split())[:200]}") from error


class PartitionLane:
    """A stream that has `compute` units of the device for itself. Jobs that share it take turns: what a job
    asks for is put into the stream while it holds `lock`."""

    def __init__(self, compute: int, stream: DeviceStream) -> None:
        self.compute = compute
        self.stream = stream
        self.lock = threading.Lock()
        self.recording = threading.Lock()
        self.jobs = 0

    def entered(self) -> AbstractContextManager[object]:
        return self.stream.entered()

    def mark(self) -> StreamEvent:
        return self.stream.mark()

    def record(self, work: Callable[[], None]) -> Recording:
        with self.recording:
            return self.stream.record(work)


class Partitions:
    """One lane with everything, and pairs of lanes that together are everything and share nothing. One thread
    alone uses it."""

    def __init__(self, whole: PartitionLane, pairs: Sequence[tuple[PartitionLane, PartitionLane]]) -> None:
        self.whole = whole
        self.pairs = list(pairs)
        self.recording = threading.Lock()
        """Held while any lane records: torch's allocator gives no memory back meanwhile."""
        for lane in self.lanes:
            lane.recording = self.recording

    @property
    def lanes(self) -> list[PartitionLane]:
        return [self.whole, *(lane for pair in self.pairs for lane in pair)]

    def take(self, share: int) -> PartitionLane:
        """Returns a lane for a job of so many units, until `give_back`. While jobs run in a pair, others join
        it: the sides of two pairs would share multiprocessors. A job with room for itself alone has
        everything."""
        lane = self._choose(share)
        lane.jobs += 1
        return lane

    def give_back(self, lane: PartitionLane) -> None:
        lane.jobs -= 1

    def at_once(self, each: Mapping[PartitionLane, int]) -> int:
        """Returns the largest sum over lanes whose jobs run at the same time: those of one pair, and perhaps
        one that was given everything before."""
        pairs = (each[first] + each[second] for first, second in self.pairs)
        return each[self.whole] + max(pairs, default=0)

    def _choose(self, share: int) -> PartitionLane:
        if share >= self.whole.compute or not self.pairs:
            return self.whole
        busy = [pair for pair in self.pairs if pair[0].jobs or pair[1].jobs]
        pairs = busy or self.pairs
        fewest = min(lane.jobs for pair in pairs for lane in pair)
        idle = [lane for pair in pairs for lane in pair if lane.jobs == fewest]
        return min(idle, key=lambda lane: (abs(lane.compute - share), lane.compute))


OLDEST_CAPABILITY: Final = (8, 0)  # bfloat16, and copies past the registers
MOST_BUSY: Final = 0.9  # of its memory that others may hold


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A torch device with its memory and its partitions."""

    torch: torch.device
    compute: int  # multiprocessors
    partitions: Partitions  # what jobs run on; made once

    def pinned(self, size: int) -> Tensor:
        """Returns [size] bytes of the host that the device copies from and to by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.torch.type == "cuda")

    def free(self) -> tuple[int, int]:
        """Returns the device's free bytes, and all its bytes."""
        if self.torch.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.torch)
            return free, total
        return 1 << 62, 1 << 62

    def held(self) -> int:
        """Returns the bytes that torch holds for this process: what is used, and, until `trim`, what was."""
        return torch.cuda.memory_reserved(self.torch) if self.torch.type == "cuda" else 0

    def trim(self) -> None:
        """Gives back memory that this process keeps and does not use, once no lane records."""
        with self.partitions.recording:
            if self.torch.type == "cuda":
                torch.cuda.empty_cache()

    def settle(self) -> None:
        """Waits for all that this process has asked for."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    @contextmanager
    def unasked(self) -> Iterator[None]:
        """Makes each call that waits for the device raise RuntimeError meanwhile, on any thread, as far as
        torch sees it. A recording that fails on that leaves torch's allocator as if it were still under
        way."""
        if self.torch.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def beside(self) -> PartitionLane:
        """Returns one more lane, beside those of jobs."""
        on_host = self.torch.type != "cuda"
        return PartitionLane(self.compute, HostStream() if on_host else CudaStream.new(self.torch))

    def enter(self) -> None:
        """Makes this device the one that the calling thread works with."""
        if self.torch.type == "cuda":
            torch.cuda.set_device(self.torch)


def uncut(device: torch.device, count: int, operations: Operations) -> Sequence[tuple[Side, Side]]:
    """Makes no partitions: a `Cut` for a device whose jobs take turns."""
    return ()


def host_device(compute: int) -> GpuDevice:
    """Returns the CPU as if it were such a device: for tests, and for machines without one."""
    half = compute // 2
    pair = PartitionLane(half, HostStream()), PartitionLane(compute - half, HostStream())
    return GpuDevice(torch.device("cpu"), compute, Partitions(PartitionLane(compute, HostStream()), [pair]))


def cuda_device(index: int, cut: Cut, operations: Operations) -> GpuDevice:
    """Returns GPU `index` of those this process sees. cut: makes complementary streams, with their
    multiprocessors. operations: one of them is tried, so that an error tells what kernels lack before a model
    is loaded. Raises ConfigError, which says what is wrong and what would be right."""
    _refuse_unusable(index)
    here = torch.device("cuda", index)
    try:
        torch.cuda.set_device(here)
        free, total = torch.cuda.mem_get_info(here)
        main = CudaStream.new(here)
    except RuntimeError as error:
        raise ConfigError(f"device: cuda:{index} cannot be used: {_line(error)}; {_OTHERS}") from error
    if free < (1 - MOST_BUSY) * total:
        raise ConfigError(
            f"device: cuda:{index} is busy: others hold {total - free:,} of its {total:,} bytes; {_OTHERS}"
        )
    refuse_kernels(main, here, operations)
    count = torch.cuda.get_device_properties(here).multi_processor_count
    try:
        pairs = [
            (PartitionLane(*first), PartitionLane(*second)) for first, second in cut(here, count, operations)
        ]
    except RuntimeError as error:  # what was tried has broken the device for this process
        raise ConfigError(
            f"device: cuda:{index} has failed while its partitions were tried: {_line(error)}"
        ) from error
    return GpuDevice(here, count, Partitions(PartitionLane(count, main), pairs))


def refuse_kernels(stream: DeviceStream, device: torch.device, operations: Operations) -> None:
    """Raises ConfigError if a stream does not run kernels, with what they lack."""
    try:
        with stream.entered():
            trial = Trial(device, operations)
            trial.ask()
            trial.check()
    except Exception as error:  # whatever a compiler, a linker and a loader say
        raise ConfigError(f"device: {why_no_launch(error)}") from error


_OTHERS: Final = "a GPU that no other process uses, or `device: cpu`, is right"


def _refuse_unusable(index: int) -> None:
    if torch.version.cuda is None:
        raise ConfigError(
            f"device: this torch ({torch.__version__}) is built without CUDA; a build with it, "
            "or `device: cpu`, is right"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, no device: its text says which
        raise ConfigError(f"device: CUDA cannot be used here: {_line(error)}") from error
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device: there is no cuda:{index}; this process sees {count} GPUs")
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST_CAPABILITY:
        raise ConfigError(
            f"device: cuda:{index} has compute capability {found[0]}.{found[1]}; "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer is right"
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
