"""Queues of work on a device, as the executor uses them: CUDA's, and the host's, which does work at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


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
        """Sends what this thread asks for meanwhile to this stream."""

    def mark(self) -> StreamEvent: ...

    def follow(self, mark: StreamEvent) -> None:
        """Makes what comes later wait, on the device, for what is before `mark`."""

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
        with self.entered():
            self.stream.synchronize()
            # other threads of this process have nothing to do with the device while graphs are made, but
            # transports' have: only what this one asks for may spoil the recording
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class StepProgress:
    """The progress of a job of several steps."""

    def __init__(self, steps: int) -> None:
        self.begun = 1  # steps that the device has been asked for
        self._most = steps
        self._lock = threading.Lock()

    def goes_on(self) -> bool:
        """Returns whether there is to be another step, which has begun then."""
        with self._lock:
            more = self.begun < self._most
            self.begun += more
            return more

    def cut(self) -> None:
        """Lets no other step begin."""
        with self._lock:
            self._most = self.begun
