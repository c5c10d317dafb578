"""The thread that speaks NIXL, for what this unit sends and for what it receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty

import msgspec
import numpy as np

from kvloom.transfer.grants import (
    ClaimRefused,
    ClaimRenewal,
    Delivered,
    FromReceiver,
    FromSender,
    Granted,
    Grants,
    Letter,
    Message,
    Quit,
    Scattered,
    Staged,
    WriteClaim,
    WritesDone,
)
from kvloom.transfer.nixl_agent import Agent, ArenaPlace, Handle, NixlEndpoint, NixlProbe, spans
from kvloom.transfer.plane import PlaneTransfer, Submit, TransferWorker
from kvloom.transfer.staging import (
    HALVES,
    MOST_SPANS,
    SINK,
    Staging,
    StagingCosts,
    free_window,
    sink_of,
)
from kvloom.transfer.target import WriteTarget
from kvloom.types.address import Endpoint, KVAddress
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.geometry import I64
from kvloom.types.transfer import BlockCopies, DeviceEvent, TransferState

_SHORTEST, _BUSY, _IDLE = 50e-6, 1e-3, 20e-3  # seconds between two looks

Clock = Callable[[], float]


class NixlTransfer(PlaneTransfer):
    """Blocks that are put may still be written by what the thread that puts them has asked its stream for."""

    def __init__(
        self,
        submit: Submit,
        place: ArenaPlace,
        peer: Endpoint,
        where: NixlEndpoint,
        target: WriteTarget,
        address: KVAddress,
        digest: int,
        begin: int,
        end: int,
    ) -> None:
        """where: the endpoint that `peer` tells of."""
        super().__init__(submit, peer, address, begin, end)
        self.place = place
        self.where, self.target, self.digest = where, target, digest
        self.number = -1
        """Its name in the messages about it."""
        self.pieces: deque[BlockCopies] = deque()
        """Copies that have yet to be written."""
        self.handle: Handle | None = None
        """NIXL's, of the write that is under way."""
        self.parts: deque[tuple[I64, I64, I64]] = deque()
        """Spans of both arenas that are to be staged: where they begin here and there, and their sizes."""
        self.windows = (-1, -1)
        """Its windows of this unit's and of the peer's staging buffer; -1: none."""
        self.halves: dict[int, bytes | None] = {}
        """The halves of them that are in use: what the peer is to be told of them; None: it was."""
        self.writing = False
        """Whether a write has begun that is not known to have ended."""
        self.written = 0
        """The bytes of that write."""
        self.asked: float | None = None
        """When it asked the peer whether it may write, while the answer is out."""
        self.deadline = 0.0
        """Until when it may write."""
        self.ended = False
        """Whether all that was put has been taken."""
        self.announced = False
        """Whether the peer has been told that everything is written."""

    @property
    def granted(self) -> bool:
        return self.state is not TransferState.PLANNED

    def _event(self) -> DeviceEvent | None:
        return self.place.mark()

    # on the transport's thread

    def take(self, copies: BlockCopies) -> None:
        try:
            self.target.check(copies)
        except BadRequest as error:
            self.fail(error)
            return
        copies = copies.in_order()
        rows = max(1, self.place.piece // self.target.block_bytes)
        self.pieces.extend(copies.part(slice(at, at + rows)) for at in range(0, len(copies.own), rows))

    def computed(self) -> bool:
        """Returns whether there is a next piece, and it can be sent."""
        if not self.pieces:
            return False
        after = self.pieces[0].after
        try:
            return after is None or after.done()
        except RuntimeError as error:
            self.fail(self.not_computed(error))
            return False


# letters to send, a transfer that begins, a measurement, or an agent to part from
Order = list[Letter] | NixlTransfer | NixlProbe | str
Task = tuple[PlaneTransfer, BlockCopies | None] | Order | None


class NixlPlane(TransferWorker[Order]):
    """Speaks with all peers, one step of each transfer at a time."""

    def __init__(
        self,
        agent: Agent,
        place: ArenaPlace,
        address: int,
        grants: Grants,
        grant: float,
        clock: Clock,
        staging: Staging | None = None,
    ) -> None:
        """address: the beginning of this unit's arena."""
        super().__init__("kv-nixl")
        self.costs: dict[str, StagingCosts] = {}
        """The gains and costs of staging with each agent; nothing is staged for an agent that is not here."""
        self._staging = staging
        self._probes: list[tuple[NixlProbe, Handle]] = []
        self._agent, self._place, self._address, self._grants = agent, place, address, grants
        self._grant, self._clock = grant, clock
        self._live: dict[int, NixlTransfer] = {}
        self._numbers = 0
        self._pause = _SHORTEST
        self._start()

    def close(self) -> None:
        super().close()
        self._agent.close()

    def _begin(self) -> None:
        self._place.enter()

    def _step(self) -> None:
        busy = self._take(self._pause)
        busy = self._hear() or busy
        for transfer in list(self._live.values()):
            busy = self._advance(transfer) or busy
        if self._probes:
            self._probes = [(probe, handle) for probe, handle in self._probes if self._goes_on(probe, handle)]
            busy = True
        most = _BUSY if self._live or len(self._grants) else _IDLE
        self._pause = _SHORTEST if busy else min(2 * self._pause, most)

    def _left(self) -> list[PlaneTransfer]:
        """Returns the transfers that are left. A write that is under way ends by itself; its receiver waits
        for its grant's end."""
        left: list[PlaneTransfer] = [*self._live.values()]
        self._live = {}
        return left

    # what the event loop wants

    def _take(self, pause: float) -> bool:
        took = False
        with suppress(Empty):
            task = self._queue.get(timeout=pause)
            while True:
                took = True
                self._do(task)
                task = self._queue.get_nowait()
        return took

    def _do(self, task: Task) -> None:
        match task:
            case NixlTransfer() as transfer:
                self._numbers += 1
                transfer.number = self._numbers
                self._live[transfer.number] = transfer
            case NixlTransfer() as transfer, BlockCopies() as copies:
                transfer.take(copies)
            case NixlTransfer() as transfer, None:
                transfer.ended = True
            case NixlProbe():
                self._probe(task)
            case str():
                self._agent.part(task)
            case list():
                self._answer(task)

    # what peers say

    def _hear(self) -> bool:
        heard = self._agent.heard()
        for agent, body in heard:
            with suppress(msgspec.MsgspecError):  # not one of ours
                message = msgspec.msgpack.decode(body, type=Message)
                if isinstance(message, FromSender):
                    self._hear_sender(agent, message)
                else:
                    self._hear_receiver(agent, message)
        return bool(heard)

    def _hear_sender(self, agent: str, message: FromSender) -> None:
        if isinstance(message, WriteClaim):
            with suppress(Unavailable):
                self._agent.meet(agent, message.metadata)
        self._answer(self._grants.hear(agent, message, self._clock()))

    def _answer(self, letters: list[Letter]) -> None:
        for agent, message in letters:
            try:
                self._agent.tell(agent, msgspec.msgpack.encode(message))
            except Unavailable:
                self._agent.part(agent)  # its grants run out

    def _hear_receiver(self, agent: str, message: FromReceiver) -> None:
        transfer = self._live.get(message.number)
        if transfer is None or transfer.where.agent != agent:
            return
        match message:
            case Granted():
                if transfer.asked is not None:
                    transfer.deadline = transfer.asked + self._grant
                    transfer.asked = None
                if transfer.state is TransferState.PLANNED:
                    transfer.become(TransferState.CLAIMED)
                    self._take_window(transfer, message.window)
            case Scattered():
                transfer.halves.pop(message.half, None)
            case ClaimRefused(_, reason):
                transfer.fail(BadRequest(reason))
            case Delivered() if transfer.announced:
                self._settle(transfer, None)

    # what is to be sent

    def _advance(self, transfer: NixlTransfer) -> bool:
        """Takes one step of one transfer. False: it waits for others."""
        writes = transfer.handle is not None  # also if it has failed meanwhile
        try:
            if (writes or transfer.failure is None) and self._keep_grant(transfer):
                return True
            if transfer.handle is not None:
                return self._land(transfer, transfer.handle)
            if transfer.failure is None:
                return self._progress(transfer)
            self._give_up(transfer)
            return True
        except KvloomError as error:
            self._lose(transfer, error)
            return True

    def _land(self, transfer: NixlTransfer, handle: Handle) -> bool:
        if not self._agent.written(transfer.where.agent, handle):
            return not self._place.progress  # to look is then what moves it on
        self._agent.drop(handle)
        self.meter.end(transfer.written)
        transfer.handle, transfer.writing = None, False
        for half, staged in transfer.halves.items():
            if staged is not None:
                transfer.halves[half] = None
                self._tell(transfer, Staged(transfer.number, half, staged))
        return True

    def _keep_grant(self, transfer: NixlTransfer) -> bool:
        now = self._clock()
        if transfer.asked is None and now >= transfer.deadline - 0.75 * self._grant:
            if not transfer.granted:
                self._agent.meet(transfer.where.agent, transfer.where.metadata)
                now = self._clock()  # to connect takes its time, which is not the peer's silence
                transfer.deadline = now + self._grant
            transfer.asked = now
            self._tell(transfer, self._question(transfer))
            return True
        if now >= transfer.deadline:
            raise Unavailable(f"no answer in {self._grant:g} s")
        return False

    def _question(self, transfer: NixlTransfer) -> FromSender:
        if transfer.granted:
            return ClaimRenewal(transfer.number)
        return WriteClaim(
            transfer.number,
            transfer.address.ticket,
            transfer.digest,
            transfer.begin,
            transfer.end,
            self._agent.metadata,
            self._staging is not None and transfer.where.agent in self.costs,
        )

    def _progress(self, transfer: NixlTransfer) -> bool:
        if not transfer.granted or transfer.announced:
            return False
        if transfer.parts:
            return self._stage(transfer)
        if transfer.computed():
            self._write(transfer, transfer.pieces.popleft())
            return True
        if transfer.ended and not transfer.pieces and not transfer.parts:
            transfer.announced = True
            self._tell(transfer, WritesDone(transfer.number))
        return transfer.announced

    def _write(self, transfer: NixlTransfer, piece: BlockCopies) -> None:
        """Unless the grant has run out meanwhile."""
        if self._clock() >= transfer.deadline:
            raise Unavailable(f"this unit was silent for more than {self._grant:g} s")
        own, peer, sizes = transfer.target.spans(piece)
        costs = self.costs.get(transfer.where.agent)
        if costs and min(transfer.windows) >= 0 and costs.pays(len(sizes), transfer.target.size(piece)):
            half = transfer.where.half
            transfer.parts.extend(transfer.target.pieces(piece, half // 2, MOST_SPANS))
        elif len(own):
            self._begin_write(transfer, self._address + own, transfer.where.address + peer, sizes)

    def _begin_write(self, transfer: NixlTransfer, own: I64, peer: I64, sizes: I64) -> None:
        """own, peer: addresses of both units' memory; all [n]."""
        if transfer.state is TransferState.CLAIMED:
            transfer.become(TransferState.COPYING)
        transfer.writing = True  # even if it fails: part of it may be on its way
        ours = spans(own, sizes, transfer.place.index)
        theirs = spans(peer, sizes, transfer.where.index)
        transfer.handle = self._agent.write(transfer.where.agent, ours, theirs)
        transfer.written = int(sizes.sum())
        self.meter.begin()

    def _take_window(self, transfer: NixlTransfer, theirs: int) -> None:
        """Gives a transfer that may stage a window of this unit's, if there is one."""
        if theirs >= 0 and self._staging is not None:
            transfer.windows = free_window({one.windows[0] for one in self._live.values()}), theirs

    def _stage(self, transfer: NixlTransfer) -> bool:
        """Gathers the next part and writes it, if half a window is free."""
        half = next((half for half in range(HALVES) if half not in transfer.halves), None)
        if half is None or self._staging is None:
            return False
        if self._clock() >= transfer.deadline:
            raise Unavailable(f"this unit was silent for more than {self._grant:g} s")
        own, peer, sizes = transfer.parts.popleft()
        ours, theirs = transfer.windows
        self._staging.gather(ours, half, own, sizes)
        transfer.halves[half] = np.stack((peer, sizes), axis=1).astype("<i8").tobytes()
        out = self._staging.address + self._staging.outward(ours, half)
        into = transfer.where.staging + (theirs * HALVES + half) * transfer.where.half
        self._begin_write(transfer, *(np.array([value]) for value in (out, into, int(sizes.sum()))))
        return True

    # how fast peers can be reached

    def _probe(self, probe: NixlProbe) -> None:
        """Begins to write from this unit's sink into the peer's."""
        where = probe.where
        try:
            if self._staging is None or not where.staging:
                raise Unavailable(f"{where.agent} has no staging buffer")
            offsets = (np.cumsum(probe.sizes) - probe.sizes)[::-1] % SINK
            ours = self._staging.address + sink_of(self._staging.half) + offsets
            theirs = where.staging + sink_of(where.half) + offsets
            self._agent.meet(where.agent, where.metadata)
            descriptors = (
                spans(at, probe.sizes, index)
                for at, index in ((ours, self._place.index), (theirs, where.index))
            )
            self._probes.append((probe, self._agent.write(where.agent, *descriptors)))
        except Unavailable as error:
            probe.done.set_exception(error)

    def _goes_on(self, probe: NixlProbe, handle: Handle) -> bool:
        """Returns whether a measurement is still under way, and tells its end."""
        try:
            if not (probe.done.cancelled() or self._agent.written(probe.where.agent, handle)):
                return True
            if probe.done.set_running_or_notify_cancel():
                probe.done.set_result(None)
        except Unavailable as error:
            probe.done.set_exception(error)
        self._agent.drop(handle)
        return False

    def _give_up(self, transfer: NixlTransfer) -> None:
        """Gives what it claimed back to the receiver; nothing of it is being written."""
        with suppress(Unavailable):
            self._tell(transfer, Quit(transfer.number))
        self._settle(transfer, transfer.failure)

    def _lose(self, transfer: NixlTransfer, error: KvloomError) -> None:
        """Ends a transfer whose peer is silent, or cannot be reached. If something may still be written the
        receiver is not told, and waits for the grant's end. To part from the peer fails its other transfers
        too, so that is not done while one of them shows that it answers."""
        transfer.fail(Unavailable(f"{transfer.peer.unit} is gone: {error.message}"))
        if transfer.writing:
            if transfer.handle is not None:
                self._agent.drop(transfer.handle)
                self.meter.end(0)
            self._settle(transfer, transfer.failure)
        else:
            self._give_up(transfer)
        if transfer.writing or not self._answers(transfer.where.agent):
            self._agent.part(transfer.where.agent)

    def _answers(self, agent: str) -> bool:
        now = self._clock()
        live = (transfer for transfer in self._live.values() if transfer.where.agent == agent)
        return any(transfer.granted and now < transfer.deadline for transfer in live)

    def _tell(self, transfer: NixlTransfer, message: FromSender) -> None:
        self._agent.tell(transfer.where.agent, msgspec.msgpack.encode(message))

    def _settle(self, transfer: NixlTransfer, failure: KvloomError | None) -> None:
        del self._live[transfer.number]
        transfer.settle(failure)
