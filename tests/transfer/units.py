"""Units of the KV plane in processes of their own, as a test calls them."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import KvloomError
from tests.forks import FORKS, preload
from tests.transfer import peer_process
from tests.transfer.wire import BLOCK_BYTES, BLOCKS, Answer, Call, Made

DEADLINE = 120.0
preload(peer_process.__name__)


class Unit:
    """arena: [blocks, block_bytes], the process' own memory, or what is in it where the host cannot map
    it."""

    def __init__(self, kind: str, name: str) -> None:
        ours, theirs = socket.socketpair()
        self.process = FORKS.Process(target=peer_process.start, args=(theirs, kind, name))
        self.process.start()
        theirs.close()
        ours.settimeout(DEADLINE)
        self.name = name
        self._socket = ours
        self._file = ours.makefile("rb")
        self._calls = 0
        self._answers: dict[int, Answer] = {}
        self._transfers = 0
        made = msgspec.convert(self.call("made"), Made)
        self.endpoint: Endpoint = made.endpoint
        self._mapped = _mapped(made) if made.fd >= 0 else None

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        found = self._mapped
        if found is None:  # it is on a device
            found = np.frombuffer(self.call("read"), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        return found

    def start(self, method: str, **arguments: object) -> int:
        self._calls += 1
        body = msgspec.msgpack.encode(Call(self._calls, method, arguments))
        self._socket.sendall(len(body).to_bytes(4, "little") + body)
        return self._calls

    def result(self, number: int) -> Any:
        """Raises the error that the call did; EOFError where the process has ended."""
        while number not in self._answers:
            size = self._file.read(4)
            if not size:
                raise EOFError(f"{self.name} has ended")
            answer = msgspec.msgpack.decode(self._file.read(int.from_bytes(size, "little")), type=Answer)
            self._answers[answer.number] = answer
        answer = self._answers.pop(number)
        if answer.error is not None:
            raise KvloomError.from_wire(answer.error)
        return answer.result

    def call(self, method: str, **arguments: object) -> Any:
        return self.result(self.start(method, **arguments))

    def open(self, begin: int, digest: int = 0, blocks: bytes = b"") -> Ticket:
        return msgspec.convert(self.call("open", begin=begin, digest=digest, blocks=blocks), Ticket)

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> int:
        """The transfer's number."""
        self._transfers += 1
        number, to = self._transfers, {"peer": peer, "address": address, "digest": digest}
        self.call("claim", number=number, begin=begin, end=end, **to)
        return number

    def close_soon(self, ticket: Ticket) -> None:
        """Ask until nobody writes any more."""
        while not self.call("close", ticket=ticket):
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE)

    def end(self) -> None:
        self._file.close()
        self._socket.close()
        self.process.join(DEADLINE)
        try:
            assert not self.process.is_alive(), f"{self.name} does not end"
        finally:
            self.process.kill()
            self.process.join()


def _mapped(made: Made) -> npt.NDArray[np.uint8]:
    fd = os.open(f"/proc/{made.pid}/fd/{made.fd}", os.O_RDWR)
    memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, BLOCKS * BLOCK_BYTES), np.uint8)
    os.close(fd)
    return memory.reshape(BLOCKS, BLOCK_BYTES)


@contextmanager
def units(kind: str, *names: str) -> Iterator[list[Unit]]:
    started: list[Unit] = []
    try:
        for name in names:
            started.append(Unit(kind, name))
        yield started
    finally:
        for unit in started:
            unit.end()
