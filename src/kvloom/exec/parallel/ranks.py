"""The other ranks: as the first one sees them, processes that it starts, and as each sees itself. They end
with the first."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from kvloom.exec.parallel.group import SECONDS, RankGroup, connect
from kvloom.exec.parallel.wire import Go, Order, RankReady, RankRefused, Report, SentMaps, StartRank, Wire
from kvloom.types.clock import ending
from kvloom.types.errors import ConfigError, KvloomError, Unavailable
from kvloom.types.geometry import I64, Geometry
from kvloom.types.job import Job
from kvloom.types.spec import EngineSpec

_log = logging.getLogger(__name__)

MODULE: Final = "kvloom.exec.rank"
LOAD_SECONDS: Final = 1800.0  # that a rank may take from one meeting to the next
NEWS_SECONDS: Final = 2.0  # after an exchange that failed, until it is known which rank has ended
ENDING_SECONDS: Final = 5.0  # for the process to end, before a job fails for want of ranks


@dataclass(frozen=True, slots=True)
class _Ended:
    how: str


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    wire: Wire


Start = Callable[[int, str], subprocess.Popen[bytes]]


def start_process(wire: int, name: str) -> subprocess.Popen[bytes]:
    """Starts a rank whose orders come by the descriptor `wire`. name: what a listing of processes shows."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(wire), name], stdin=subprocess.DEVNULL, pass_fds=[wire]
    )


class Ranks:
    """The processes of the other ranks."""

    def __init__(
        self, spec: EngineSpec, device: torch.device, folder: Path | None, start: Start = start_process
    ) -> None:
        """Starts the others. device: this rank's. folder: for a file by which they find each other. Raises
        Unavailable if one ends meanwhile, ConfigError if one cannot use its device."""
        begin = StartRank(rank=0, store="", spec=spec)
        self.lost: Future[str] = Future()  # why no job can run any more, once that is so
        self.group = RankGroup(0, begin.size)  # this rank's end of the exchanges
        self._name = spec.unit
        self._start_process = start
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._news: queue.SimpleQueue[Report | _Ended] = queue.SimpleQueue()
        self._maps: SentMaps | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=folder)
        self._members: list[_Member] = []
        store = f"{self._folder.name}/store"
        try:
            for rank in range(1, begin.size):
                self._members.append(self._start(rank))
                self._order(self._members[-1], msgspec.structs.replace(begin, rank=rank, store=store))
            self.meet()
            self.group = self._connect(store, begin, device)
        except BaseException:
            self.close()
            raise

    def _connect(self, store: str, begin: StartRank, device: torch.device) -> RankGroup:
        try:
            return connect(store, 0, begin.size, begin.slots, device)
        except Unavailable as error:  # another rank, which was connected already, may have refused its models
            raise self._refused(error) from error

    def meet(self, arena: str = "") -> None:
        """Waits until all others have come as far, and lets them go on. arena: see `Go`. Raises as
        `RankTeam`'s does."""
        here = 0
        while here < len(self._members):
            match self._heard(LOAD_SECONDS):
                case RankReady():
                    here += 1
                case RankRefused(message):
                    raise ConfigError(message)
                case _Ended(how):
                    raise Unavailable(how)
                case None:
                    raise Unavailable(f"{self._name}: a rank has not loaded within {LOAD_SECONDS:g} s")
        self._tell(Go(arena))

    def serve(self, geometries: Mapping[str, Geometry], blocks: int) -> None:
        """Lets jobs come, now that everything is loaded. geometries, blocks: those of each rank."""
        self._maps = SentMaps(geometries, blocks)
        if self.group.device.type == "cpu":
            self._folder.cleanup()  # they have found each other; NCCL may look there later

    def step(self, slot: int, job: Job, kept: I64) -> None:
        """Lets the others run this job too, over the channel of `slot`. Raises Unavailable."""
        assert self._maps is not None
        if self.lost.done():
            raise Unavailable(self.lost.result())
        with self._lock:
            self._tell(self._maps.step(slot, job, kept))
        self.group.enter(slot)

    def late(self, seconds: float) -> None:
        """Ends the ranks: no job has ended for so long, though some are under way, so one of them is
        stuck."""
        self._lose(f"{self._name}: no job has ended within {seconds:g} s: a rank is stuck")

    def failed(self, error: BaseException) -> KvloomError:
        """Ends the ranks after a failure here, for they are no longer in step. Returns what to raise, a while
        after `lost` was told: whoever heeds that ends before requests are told of a job."""
        with suppress(Late):
            self.lost.result(NEWS_SECONDS)
        self._lose(f"{self._name}: a job failed at the first rank, or was late at another: {error}")
        self._closed.wait(ENDING_SECONDS)
        return Unavailable(self.lost.result())

    async def ended(self) -> str:
        """Waits until no job can run any more, and returns why."""
        return await asyncio.shield(asyncio.wrap_future(self.lost))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds the loading of all ranks. What fails here ends the others; if another one failed first,
        that is raised."""
        try:
            yield
        except Unavailable as error:
            reason = self._refused(error)
            self.close()
            raise reason from error
        except BaseException:
            self.close()
            raise

    def _refused(self, error: Unavailable) -> KvloomError:
        """Returns what to raise after loading has failed at an exchange: why, if another rank knows."""
        news = self._heard(NEWS_SECONDS)
        while isinstance(news, RankReady):
            news = self._heard(NEWS_SECONDS)
        match news:
            case RankRefused(message):
                return ConfigError(message)
            case _Ended(how):
                return Unavailable(how)
        return error

    def close(self) -> None:
        """Ends the others, and waits until they have ended."""
        self._closed.set()
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait()
            member.wire.close()
        self.group.close()
        self._folder.cleanup()

    def _start(self, rank: int) -> _Member:
        ours, theirs = socket.socketpair()
        name = f"{self._name}-rank-{rank}"
        with theirs:
            process = self._start_process(theirs.fileno(), name)
        member = _Member(rank, process, Wire(ours, seconds=int(SECONDS)))
        threading.Thread(target=self._follow, args=(member,), name=name, daemon=True).start()
        return member

    def _follow(self, member: _Member) -> None:
        """Listens to a rank on a thread of its own, until the rank has ended."""
        decoder = msgspec.msgpack.Decoder(Report)
        while (message := member.wire.receive()) is not None:
            self._news.put(decoder.decode(message))
        how = f"{self._name}: rank {member.rank} {ending(member.process.wait())}"
        self._news.put(_Ended(how))
        if not self._closed.is_set():
            self._lose(how)

    def _lose(self, how: str) -> None:
        """Ends the ranks that are left: they would wait for the one that is gone, and so would this one for
        them."""
        with suppress(InvalidStateError):  # the first reason stands
            self.lost.set_result(how)
        for member in self._members:
            member.process.kill()

    def _heard(self, seconds: float) -> Report | _Ended | None:
        with suppress(queue.Empty):
            return self._news.get(timeout=seconds)
        return None

    def _tell(self, order: Order) -> None:
        for member in self._members:
            self._order(member, order)

    def _order(self, member: _Member, order: Order) -> None:
        try:
            member.wire.send(order)
        except OSError as error:
            raise Unavailable(f"{self._name}: rank {member.rank} takes no orders: {error}") from error


class Member:
    """A rank but the first, in its own process. It receives what the first rank says on a thread of its own,
    which ends the process with the first rank."""

    group: RankGroup

    def __init__(self, wire: Wire) -> None:
        self.arena = ""
        """The file of the arena of all ranks, once the first one has told it."""
        self._wire = wire
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def next(self) -> Order:
        return self._orders.get()

    def meet(self) -> None:
        self._wire.send(RankReady())
        order = self.next()
        assert isinstance(order, Go)
        self.arena = order.arena

    def join(self, begin: StartRank, device: torch.device) -> None:
        """Finds the other ranks, once this one can compute on `device`; they look for it too. Raises
        Unavailable."""
        self.meet()
        self.group = connect(begin.store, begin.rank, begin.size, begin.slots, device)

    def refuse(self, error: ConfigError) -> None:
        self._wire.send(RankRefused(error.message))

    def _listen(self) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(Order)
            while (message := self._wire.receive()) is not None:
                self._orders.put(decoder.decode(message))
        finally:
            os._exit(0)


def check(ran: Future[Any]) -> None:
    """Ends the process after a failure: the ranks are not in step any more, and the first one has to know."""
    error = ran.exception()
    if error is not None:
        _log.error("a job failed", exc_info=error)
        sys.stderr.flush()
        os._exit(1)
