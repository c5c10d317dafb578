"""The exchanges of a unit's ranks while they compute, and what they go over."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    Backend,
    FileStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    Work,
)

from kvloom.types.errors import Unavailable

SECONDS: Final = 60.0  # that a rank waits for the others in one exchange
_HERE: Final = "127.0.0.1"  # the ranks of a unit share a machine, and nobody else is to reach them
_CPU: Final = torch.device("cpu")
_Kind = ProcessGroup.BackendType


class _Slot(threading.local):
    number = 0


class RankGroup:
    """One rank's end; what is exchanged lies on `device`. Jobs that run at the same time must not meet in one
    exchange, so each slot has its own channel, and each thread says by `enter` which slot it works for.

    On a GPU an exchange is a kernel on the current stream, which waits there for the other ranks: it is
    recorded like any other, and a rank that is missing shows only when somebody waits for the stream.
    """

    def __init__(
        self, rank: int, size: int, channels: Sequence[ProcessGroup] = (), device: torch.device = _CPU
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._channels = channels
        self._slot = _Slot()

    def enter(self, slot: int) -> None:
        """Sends this thread's exchanges over the channel of `slot` from now on; at first they go over the
        first one."""
        self._slot.number = slot

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, in its place; the same bits at each, once all ranks have come
        there. Raises Unavailable if a rank is missing."""
        if not x.numel():  # backends wait for nobody then
            self.sum(x.new_zeros(1))
            return x
        x, how = x.contiguous(), AllreduceOptions()
        how.asyncOp = False  # else NCCL takes a stream of its own
        try:
            _wait(self._channel.allreduce([x], how))
        except RuntimeError as error:
            raise _lost(error) from error
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x [..., w] side by side: [..., size · w]. Raises Unavailable if a rank is
        missing."""
        x, how = x.contiguous(), AllgatherOptions()
        how.asyncOp = False
        parts = x.new_empty(self.size * x.numel())
        try:
            _wait(self._channel._allgather_base(parts, x.view(-1), how))
        except RuntimeError as error:
            raise _lost(error) from error
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def agree(self, said: bool) -> bool:
        """Returns whether all ranks say so."""
        return int(self.sum(torch.tensor([int(said)], device=self.device))) == self.size

    def least(self, number: int) -> int:
        """Returns the smallest number that a rank has."""
        return int(self.gather(torch.tensor([number], device=self.device)).min())

    def span(self, length: int) -> slice:
        """Returns this rank's part of `length`: a like number for each, the last one's perhaps shorter."""
        each = -(-length // self.size)
        return slice(min(self.rank * each, length), min((self.rank + 1) * each, length))

    def close(self) -> None:
        """Ends the exchanges. gloo's threads would otherwise outlive the interpreter, and end it badly."""
        self._channels = ()

    @property
    def _channel(self) -> ProcessGroup:
        return self._channels[self._slot.number]


def _wait(work: Work | None) -> None:
    """Waits for an exchange. NCCL has nothing to wait for if the exchange is on the current stream."""
    if work is not None:
        work.wait()


def connect(store: str, rank: int, size: int, slots: int, device: torch.device) -> RankGroup:
    """Meets the other ranks, which call this too: NCCL on GPUs, gloo elsewhere. store: a new file, that all
    can reach.

    slots: jobs that may run at the same time; one with NCCL, whose communicators on one device must not run
    beside each other. Raises Unavailable if a rank does not come.
    """
    timeout, make = timedelta(seconds=SECONDS), _nccl if device.type == "cuda" else _gloo
    try:
        meeting = FileStore(store, size)
        meeting.set_timeout(timeout)
        ends = [PrefixStore(str(slot), meeting) for slot in range(slots)]
        return RankGroup(rank, size, [make(end, rank, size, timeout) for end in ends], device)
    except RuntimeError as error:
        raise _lost(error) from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=_HERE)]
    options._threads = 1
    return _channel(store, rank, size, "cpu", _Kind.GLOO, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415  (not in every torch)

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _channel(store, rank, size, "cuda", _Kind.NCCL, ProcessGroupNCCL(store, rank, size, options))


def _channel(
    store: Store, rank: int, size: int, device: str, kind: ProcessGroup.BackendType, backend: Backend
) -> ProcessGroup:
    """Returns a process group that torch.distributed's globals do not know of."""
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def _lost(error: RuntimeError) -> Unavailable:
    reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines() or [type(error).__name__]
    return Unavailable(f"the exchange with the other ranks failed: {reason[0][:200]}")


class RankTeam(Protocol):
    """All ranks of a unit, as one of them sees them while it loads."""

    @property
    def group(self) -> RankGroup: ...

    def meet(self) -> None:
        """Waits until all ranks are here, however long they load. Raises Unavailable if one has ended,
        ConfigError if one cannot use what it was given."""
