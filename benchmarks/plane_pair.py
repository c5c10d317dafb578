"""Two ends of the KV plane in two processes, and ways to send between them, for benchmarks that compare such
ways. A context of 2,000 tokens of shape A (12 layers, 12 KV heads, head size 64, float32) lies in blocks of
16 KiB.

python -m benchmarks.plane_pair KIND HOST SENDS is the receiver.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvloom.kv.arena import Arena
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import HostPlace
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.transfer.staging import ALWAYS, NEVER
from kvloom.transfer.tcp import TcpTransport
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import I32, Geometry
from kvloom.types.transfer import BlockCopies, Transport

TOKENS: Final = 2000
DIGEST: Final = 0  # of every address: what is measured comes after it
FORM: Final = KVForm.of(
    Geometry(layers=12, kv_heads=12, head_dim=64, itemsize=4, block_bytes=16384), "float32"
)
SHAPE: Final = (-(-TOKENS // FORM.tokens_per_block), FORM.layers, FORM.kv_heads)
BLOCKS: Final = 2 * int(np.prod(SHAPE))
SIZE: Final = TOKENS * FORM.layers * FORM.kv_heads * 2 * FORM.head_dim * 4  # bytes of K and V
LOOPBACK: Final = "127.0.0.1"
ROOT: Final = Path(__file__).resolve().parents[1]
_CHUNK: Final = 1 << 20

Way = Callable[[], Awaitable[None]]


class Told(msgspec.Struct, frozen=True):
    """What the receiver says of itself: a ticket for each send, and where it takes plain bytes."""

    endpoint: Endpoint
    tickets: list[Ticket]
    host: str
    port: int


def transport(kind: str, unit: str, arena: Arena, host: str = LOOPBACK) -> Transport:
    """Returns one end. kind: `shm`, `tcp`, `nixl`, or `nixl-staged`, which gathers whatever is scattered."""
    match kind:
        case "shm":
            return ShmTransport(unit, arena)
        case "tcp":
            return TcpTransport(unit, arena, "benchmark", host)
        case "nixl" | "nixl-staged":
            return NixlTransport(unit, arena, HostPlace(), host, costs=NEVER if kind == "nixl" else ALWAYS)
    raise ValueError(kind)


def sender_arena() -> Arena:
    """Returns an arena that is full of something."""
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.random_()
    return arena


def adjacent() -> I32:
    """Returns [pages, layers, kv_heads] blocks, one behind the other."""
    return np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)


def scattered(rng: np.random.Generator) -> I32:
    """Returns [pages, layers, kv_heads] blocks from all over an arena."""
    return rng.permutation(BLOCKS)[: np.prod(SHAPE)].astype(np.int32).reshape(SHAPE)


class Sender:
    """The end in this process. Each send takes one ticket."""

    def __init__(self, kind: str, arena: Arena, told: Told) -> None:
        self.transport = transport(kind, "sender", arena, own_address(told.host))
        self.endpoint = told.endpoint
        self._tickets = iter(told.tickets)

    async def send(self, own: I32, peer: I32, parts: int = 1) -> None:
        """Sends all tokens from blocks `own` to blocks `peer`, both [pages, layers, kv_heads], in several
        puts of as many layers as `parts` leaves, until the receiver's ledger has them."""
        address = KVAddress(
            model="m",
            form=FORM,
            begin=0,
            end=TOKENS,
            blocks=KVAddress.compress(peer),
            ticket=next(self._tickets),
        )
        transfer = self.transport.claim(self.endpoint, address, DIGEST, 0, TOKENS)
        each = FORM.layers // parts
        for layer in range(0, FORM.layers, each):
            transfer.put(_copies(own[:, layer : layer + each], peer[:, layer : layer + each]))
        await transfer.arrived()


def own_address(peer: str) -> str:
    """Returns the address of this host from which that peer is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((peer, 1))
        found: str = sock.getsockname()[0]
        return found


def _copies(own: I32, peer: I32) -> BlockCopies:
    counts = np.full(SHAPE[0], FORM.tokens_per_block, np.int32)
    counts[-1] = TOKENS - (SHAPE[0] - 1) * FORM.tokens_per_block
    counts = np.repeat(counts, own.size // SHAPE[0])
    return BlockCopies(own.ravel(), peer.ravel(), np.zeros_like(counts), counts)


def environment() -> dict[str, str]:
    """Returns the environment for a process that may begin in another folder than this one's."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def receiver(kind: str, sends: int, host: str = LOOPBACK, by: Sequence[str] = ()) -> Iterator[Told]:
    """Runs the other end, which has room for so many sends. by: the command that starts it, as at another
    host."""
    command = [*by, sys.executable, "-m", "benchmarks.plane_pair", kind, host, str(sends)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = process.stdout.readline()
            if not told:
                raise RuntimeError(f"the receiver of {kind} at {host} has ended")
            yield msgspec.json.decode(told, type=Told)
        finally:
            process.stdin.close()
            process.wait()


async def take_turns(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each way, which take turns; a first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            await way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def receive(kind: str, host: str, sends: int) -> None:
    """Reserves, and takes plain bytes, until the input ends."""
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.fill_(1)
    end = transport(kind, "receiver", arena, host)
    everywhere = struct.pack("<ii", 0, BLOCKS)
    tickets = [end.open(0, DIGEST, everywhere) for _ in range(sends)]
    with socket.create_server((host, 0)) as listener:
        told = Told(end.endpoint, tickets, *listener.getsockname())
        threading.Thread(target=_take, args=(listener, arena.bytes.numpy().data), daemon=True).start()
        print(msgspec.json.encode(told).decode(), flush=True)
        sys.stdin.read()
    end.close_all()


def _take(listener: socket.socket, memory: memoryview) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # it is closed
            return
        threading.Thread(target=_drain, args=(sock, memory), daemon=True).start()


def _drain(sock: socket.socket, memory: memoryview) -> None:
    """Takes runs of bytes, each behind its length, and answers each with one byte."""
    with sock:
        while head := sock.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                left -= sock.recv_into(memory[: min(left, _CHUNK)])
            sock.sendall(b".")


if __name__ == "__main__":
    receive(sys.argv[1], sys.argv[2], int(sys.argv[3]))
