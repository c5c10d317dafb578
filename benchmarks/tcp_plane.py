"""The rate of the KV plane over TCP between two processes, against a plain copy over sockets.

python -m benchmarks.tcp_plane [--nixl] [--host ADDRESS --by "ip netns exec NAME"]. A context of 2,000 tokens
of shape A (149 MB) in blocks of 16 KiB, which are adjacent in both arenas, or scattered over both. All ways
take turns in one run; medians. `socket` sends as many bytes from one buffer into another over one connection,
`sockets` over as many as the plane has. The receiver listens at ADDRESS, and `--by` starts it, as in another
network namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Final

import msgspec
import numpy as np

from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.transfer import BLOCKS, DIGEST, FORM, SHAPE, TOKENS
from kvloom.kv.arena import Arena
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import HostPlace
from kvloom.transfer.tcp import LINKS, TcpTransport
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.geometry import I32
from kvloom.types.transfer import BlockCopies, Transport

SIZE: Final = int(np.prod(SHAPE)) * FORM.block_bytes  # bytes of the context's blocks
LEAST: Final = 70.0  # percent of the sockets' rate
CHUNK: Final = 1 << 20

Way = Callable[[], Awaitable[None]]


class Told(msgspec.Struct, frozen=True):
    """What the receiver says of itself: a ticket for each send, and where it takes plain bytes."""

    endpoint: Endpoint
    tickets: list[Ticket]
    port: int


def _transport(kind: str, unit: str, arena: Arena, host: str) -> Transport:
    if kind == "nixl":
        return NixlTransport(unit, arena, HostPlace())
    return TcpTransport(unit, arena, "benchmark", host)


def receive(kind: str, host: str, sends: int) -> None:
    """The other process: reserves, and takes plain bytes, until its input ends."""
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.fill_(1)
    transport = _transport(kind, "receiver", arena, host)
    everywhere = struct.pack("<ii", 0, BLOCKS)
    tickets = [transport.open(0, DIGEST, everywhere) for _ in range(sends)]
    with socket.create_server((host, 0)) as listener:
        told = Told(transport.endpoint, tickets, listener.getsockname()[1])
        threading.Thread(target=_take, args=(listener, arena.bytes.numpy().data), daemon=True).start()
        print(msgspec.json.encode(told).decode(), flush=True)
        sys.stdin.read()
    transport.close_all()


def _take(listener: socket.socket, memory: memoryview) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_drain, args=(sock, memory), daemon=True).start()


def _drain(sock: socket.socket, memory: memoryview) -> None:
    """Takes runs of bytes, each behind its length, and answers each with one byte."""
    with sock:
        while head := sock.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                left -= sock.recv_into(memory[: min(left, CHUNK)])
            sock.sendall(b".")


@contextmanager
def _receiver(kind: str, host: str, by: Sequence[str], sends: int) -> Iterator[Told]:
    command = [*by, sys.executable, "-m", "benchmarks.tcp_plane", "--receive", kind, host, str(sends)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=Told)
        finally:
            process.stdin.close()
            process.wait()


class Sender:
    """own, peer: [pages, layers, kv_heads] blocks."""

    def __init__(self, kind: str, arena: Arena, told: Told) -> None:
        self.transport = _transport(kind, "sender", arena, "127.0.0.1")
        self._endpoint = told.endpoint
        self._tickets = iter(told.tickets)

    async def send(self, own: I32, peer: I32) -> None:
        address = KVAddress(
            model="m",
            form=FORM,
            begin=0,
            end=TOKENS,
            blocks=KVAddress.compress(peer),
            ticket=next(self._tickets),
        )
        transfer = self.transport.claim(self._endpoint, address, DIGEST, 0, TOKENS)
        counts = np.full(own.size, FORM.tokens_per_block, np.int32)
        transfer.put(BlockCopies(own.ravel(), peer.ravel(), np.zeros_like(counts), counts))
        await transfer.arrived()


class Sockets:
    """Plain connections to the receiver."""

    def __init__(self, host: str, port: int, count: int, memory: memoryview) -> None:
        self._sockets = [socket.create_connection((host, port)) for _ in range(count)]
        self._memory = memory[: SIZE // count]

    async def send(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._send, sock) for sock in self._sockets))

    def _send(self, sock: socket.socket) -> None:
        sock.sendall(len(self._memory).to_bytes(8, "little"))
        sock.sendall(self._memory)
        sock.recv(1)


async def measure_rates(rounds: int, nixl: bool, host: str, by: Sequence[str]) -> dict[str, list[float]]:
    """Returns the seconds of each way, in turns; a first turn is not counted."""
    rng = np.random.default_rng(0)
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.random_()
    memory = arena.bytes.numpy().data
    adjacent = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
    scattered = [rng.permutation(BLOCKS)[: adjacent.size].astype(np.int32).reshape(SHAPE) for _ in range(2)]
    ways: dict[str, Way] = {}
    with ExitStack() as stack:
        for kind in ("tcp", "nixl") if nixl else ("tcp",):
            told = stack.enter_context(_receiver(kind, host, by, 2 * (rounds + 1)))
            sender = Sender(kind, arena, told)
            stack.callback(sender.transport.close_all)
            ways[f"{kind}, adjacent"] = lambda sender=sender: sender.send(adjacent, adjacent)  # type: ignore[misc]
            ways[f"{kind}, scattered"] = lambda sender=sender: sender.send(*scattered)  # type: ignore[misc]
            if kind == "tcp":
                ways["socket"] = Sockets(host, told.port, 1, memory).send
                ways["sockets"] = Sockets(host, told.port, LINKS, memory).send
        return await _take_turns(ways, rounds)


async def _take_turns(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            await way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(rounds: int = 30, nixl: bool = False, host: str = "127.0.0.1", by: Sequence[str] = ()) -> Report:
    seconds = asyncio.run(measure_rates(rounds, nixl, host, by))
    rates = {name: SIZE / median(found) / 1e9 for name, found in seconds.items()}
    plain = max(rates["socket"], rates["sockets"])
    share = {name: 100 * rate / plain for name, rate in rates.items()}
    return Report(
        name="tcp-plane",
        title=f"{TOKENS} tokens of shape A ({SIZE / 1e6:.0f} MB) over TCP between two processes",
        columns=["", "ms", "GB/s", "% of the faster sockets"],
        rows=[[name, 1e3 * median(seconds[name]), rates[name], share[name]] for name in rates],
        findings=[
            Finding(
                what=f"{name} blocks against sockets", value=share[f"tcp, {name}"], unit=" %", least=LEAST
            )
            for name in ("adjacent", "scattered")
        ],
        machine=this_machine(),
        raw={"seconds": seconds},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--nixl", action="store_true", help="NIXL too, where it is installed")
    parser.add_argument("--host", default="127.0.0.1", help="the address at which the receiver listens")
    parser.add_argument("--by", default="", help="what starts the receiver, as in another network")
    parser.add_argument("--receive", nargs=3, metavar=("KIND", "HOST", "SENDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        kind, host, sends = options.receive
        receive(kind, host, int(sends))
        return
    publish(measure(options.rounds, options.nixl, options.host, shlex.split(options.by)))


if __name__ == "__main__":
    main()
