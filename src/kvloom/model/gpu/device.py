"""The device of a unit: which one, whether it can be used, and what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvloom.core.errors import ConfigError
from kvloom.model.gpu.partitions import Lane, Partitions
from kvloom.model.gpu.streams import CudaStream, HostStream, Stream

OLDEST_CAPABILITY: Final = (8, 0)  # bfloat16, and copies past the registers
MOST_BUSY: Final = 0.9  # of its memory that others may hold
Cut = Callable[[torch.device, int], Sequence[tuple[tuple[int, Stream], tuple[int, Stream]]]]


@dataclass(frozen=True, slots=True)
class Device:
    """compute: multiprocessors. partitions: what jobs run on; made once."""

    torch: torch.device
    compute: int
    partitions: Partitions

    def pinned(self, size: int) -> Tensor:
        """[size] bytes of the host that the device copies from and to by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.torch.type == "cuda")

    def free(self) -> tuple[int, int]:
        """Bytes that nobody holds, and bytes in all."""
        if self.torch.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.torch)
            return free, total
        return 1 << 62, 1 << 62

    def trim(self) -> None:
        """Give back memory that this process keeps and does not use."""
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait for all that this process has asked for."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    @contextmanager
    def unasked(self) -> Iterator[None]:
        """What waits for the device meanwhile raises RuntimeError instead, on any thread, as far as torch
        sees it. A recording that fails on that leaves torch's allocator as if it were still under way."""
        if self.torch.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def beside(self) -> Lane:
        """One more lane, beside those of jobs."""
        on_host = self.torch.type != "cuda"
        return Lane(self.compute, HostStream() if on_host else CudaStream.new(self.torch))

    def enter(self) -> None:
        """What this thread asks for is meant for this device."""
        if self.torch.type == "cuda":
            torch.cuda.set_device(self.torch)


def uncut(device: torch.device, count: int) -> Sequence[tuple[tuple[int, Stream], tuple[int, Stream]]]:
    """A `Cut` for a device whose jobs take turns."""
    return ()


def host_device(compute: int) -> Device:
    """The CPU as if it were such a device: for tests, and for machines without one."""
    half = compute // 2
    pair = Lane(half, HostStream()), Lane(compute - half, HostStream())
    return Device(torch.device("cpu"), compute, Partitions(Lane(compute, HostStream()), [pair]))


def cuda_device(index: int, cut: Cut) -> Device:
    """GPU `index` of those this process sees. cut: makes complementary streams, with their multiprocessors.
    Raises ConfigError with what is wrong and what would be right."""
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
    count = torch.cuda.get_device_properties(here).multi_processor_count
    pairs = [(Lane(*first), Lane(*second)) for first, second in cut(here, count)]
    return Device(here, count, Partitions(Lane(count, main), pairs))


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
