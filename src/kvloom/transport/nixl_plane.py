"""The thread that speaks NIXL, for what this unit sends and for what it receives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import get_args

import msgspec

from kvloom.transport.agent import Agent, Transfer
from kvloom.transport.delivery import Delivery
from kvloom.transport.grants import Grants, Letter
from kvloom.transport.marks import MarkedParcel
from kvloom.transport.messages import (
    Claim,
    Delivered,
    Done,
    FromReceiver,
    FromSender,
    Granted,
    Message,
    Quit,
    Refused,
    Renew,
)
from kvloom.transport.nixl_shipment import NixlShipment
from kvloom.transport.place import Place
from kvloom.transport.worker import Worker
from kvloom.types.errors import BadRequest, KvloomError, Unavailable
from kvloom.types.transfer import Parcel

_SHORTEST, _BUSY, _IDLE = 50e-6, 1e-3, 20e-3  # seconds between two looks

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Letters:
    letters: list[Letter]


Order = Letters | NixlShipment | str  # letters to send, a shipment that begins, or an agent to part from
Task = tuple[Delivery, Parcel | None] | Order | None


class NixlPlane(Worker[Order]):
    def __init__(
        self, agent: Agent, place: Place, address: int, grants: Grants, grant: float, clock: Clock
    ) -> None:
        """address: where this unit's arena begins."""
        super().__init__("kv-nixl")
        self._agent, self._place, self._address, self._grants = agent, place, address, grants
        self._grant, self._clock = grant, clock
        self._live: dict[int, NixlShipment] = {}
        self._numbers = 0
        self._pause = _SHORTEST
        self._start()

    def start(self, shipment: NixlShipment) -> None:
        """Ask the peer at once, before there is anything to write."""
        self.order(shipment)

    def post(self, letters: list[Letter]) -> None:
        if letters:
            self.order(Letters(letters))

    def part(self, agent: str) -> None:
        self.order(agent)

    def close(self) -> None:
        super().close()
        self._agent.close()

    def _begin(self) -> None:
        self._place.enter()

    def _step(self) -> None:
        busy = self._take(self._pause)
        busy = self._hear() or busy
        for shipment in list(self._live.values()):
            busy = self._advance(shipment) or busy
        most = _BUSY if self._live or len(self._grants) else _IDLE
        self._pause = _SHORTEST if busy else min(2 * self._pause, most)

    def _left(self) -> list[Delivery]:
        """A transfer that is under way ends by itself; its receiver waits for its grant's end."""
        left: list[Delivery] = [*self._live.values()]
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
            case NixlShipment() as shipment:
                self._numbers += 1
                shipment.number = self._numbers
                self._live[shipment.number] = shipment
            case NixlShipment() as shipment, MarkedParcel() as parcel:
                shipment.take(parcel)
            case NixlShipment() as shipment, None:
                shipment.seal()
            case str():
                self._agent.part(task)
            case Letters():
                self._answer(task.letters)

    # what peers say

    def _hear(self) -> bool:
        heard = self._agent.heard()
        for agent, body in heard:
            with suppress(msgspec.MsgspecError):  # not one of ours
                message = msgspec.msgpack.decode(body, type=Message)
                if isinstance(message, get_args(FromSender)):
                    self._hear_sender(agent, message)
                else:
                    self._hear_receiver(agent, message)
        return bool(heard)

    def _hear_sender(self, agent: str, message: FromSender) -> None:
        if isinstance(message, Claim):
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
        shipment = self._live.get(message.number)
        if shipment is None or shipment.where.agent != agent:
            return
        match message:
            case Granted():
                if shipment.asked is not None:
                    shipment.deadline = shipment.asked + self._grant
                    shipment.asked = None
                shipment.granted = True
            case Refused(_, reason):
                shipment.fail(BadRequest(reason))
            case Delivered():
                self._settle(shipment, None)

    # what is to be sent

    def _advance(self, shipment: NixlShipment) -> bool:
        """One step of one shipment. False: it waits for others."""
        writes = shipment.transfer is not None  # also where it has failed meanwhile
        try:
            if (writes or shipment.failure is None) and self._keep_grant(shipment):
                return True
            if shipment.transfer is not None:
                return self._land(shipment, shipment.transfer)
            if shipment.failure is None:
                return self._progress(shipment)
            self._give_up(shipment)
            return True
        except KvloomError as error:
            self._lose(shipment, error)
            return True

    def _land(self, shipment: NixlShipment, transfer: Transfer) -> bool:
        if not self._agent.written(shipment.where.agent, transfer):
            return not self._place.progress  # to look is then what moves it on
        self._agent.drop(transfer)
        shipment.transfer, shipment.writing = None, False
        return True

    def _keep_grant(self, shipment: NixlShipment) -> bool:
        now = self._clock()
        if shipment.asked is None and now >= shipment.deadline - 0.75 * self._grant:
            if not shipment.granted:
                self._agent.meet(shipment.where.agent, shipment.where.metadata)
                now = self._clock()  # to connect takes its time, which is not the peer's silence
                shipment.deadline = now + self._grant
            shipment.asked = now
            self._tell(shipment, self._question(shipment))
            return True
        if now >= shipment.deadline:
            raise Unavailable(f"no answer in {self._grant:g} s")
        return False

    def _question(self, shipment: NixlShipment) -> FromSender:
        if shipment.granted:
            return Renew(shipment.number)
        return Claim(
            shipment.number,
            shipment.ticket,
            shipment.digest,
            shipment.begin,
            shipment.end,
            self._agent.metadata,
        )

    def _progress(self, shipment: NixlShipment) -> bool:
        if not shipment.granted or shipment.told:
            return False
        if shipment.computed():
            self._write(shipment, shipment.pieces.popleft())
            return True
        if shipment.ended and not shipment.pieces:
            shipment.told = True
            self._tell(shipment, Done(shipment.number))
        return shipment.told

    def _write(self, shipment: NixlShipment, piece: Parcel) -> None:
        """Unless the grant has run out meanwhile."""
        if self._clock() >= shipment.deadline:
            raise Unavailable(f"this unit was silent for more than {self._grant:g} s")
        own, peer = shipment.spans(piece, self._address)
        if len(own):
            shipment.writing = True  # even where it fails: part of it may be on its way
            shipment.transfer = self._agent.write(shipment.where.agent, own, peer)

    def _give_up(self, shipment: NixlShipment) -> None:
        """While nothing of it is being written: what it claimed is the receiver's again."""
        with suppress(Unavailable):
            self._tell(shipment, Quit(shipment.number))
        self._settle(shipment, shipment.failure)

    def _lose(self, shipment: NixlShipment, error: KvloomError) -> None:
        """Its peer is silent, or cannot be reached. Where something may still be written the receiver is not
        told, and waits for the grant's end. To part from the peer fails its other shipments too, so that is
        not done while one of them shows that it answers."""
        shipment.fail(Unavailable(f"{shipment.peer.unit} is gone: {error.message}"))
        if shipment.writing:
            if shipment.transfer is not None:
                self._agent.drop(shipment.transfer)
            self._settle(shipment, shipment.failure)
        else:
            self._give_up(shipment)
        if shipment.writing or not self._answers(shipment.where.agent):
            self._agent.part(shipment.where.agent)

    def _answers(self, agent: str) -> bool:
        now = self._clock()
        live = (shipment for shipment in self._live.values() if shipment.where.agent == agent)
        return any(shipment.granted and now < shipment.deadline for shipment in live)

    def _tell(self, shipment: NixlShipment, message: FromSender) -> None:
        self._agent.tell(shipment.where.agent, msgspec.msgpack.encode(message))

    def _settle(self, shipment: NixlShipment, failure: KvloomError | None) -> None:
        del self._live[shipment.number]
        shipment.settle(failure)
