"""The KV plane's rate between two processes, against a memcpy's between the same two arenas.

python -m benchmarks.transfer [--nixl]. A context of 2,000 tokens of shape A (12 layers, 12 KV heads, head
size 64, float32), in blocks of 16 KiB scattered over both arenas. All ways take turns in one run; medians.
`plane` is from claim to the receiver's ledger, in one copies; `by layer` is the same in twelve.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import numpy as np

from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.kv.arena import Arena
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.shared_memory import ShmPeer, ShmTransport
from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket
from kvloom.types.geometry import I32, Geometry
from kvloom.types.transfer import BlockCopies

TOKENS = 2000
DIGEST = 0  # of every address: what is measured comes after it
FORM = KVForm.of(Geometry(layers=12, kv_heads=12, head_dim=64, itemsize=4, block_bytes=16384), "float32")
LEAST = 80.0  # percent of memcpy's rate
SHAPE = (-(-TOKENS // FORM.tokens_per_block), FORM.layers, FORM.kv_heads)
BLOCKS = 2 * int(np.prod(SHAPE))
_TRANSPORTS = {"shm": ShmTransport, "nixl": NixlTransport}

Way = Callable[[], Awaitable[None]]


class Open(msgspec.Struct, frozen=True):
    """What the receiver says of itself, and a ticket of its for each send."""

    endpoint: Endpoint
    tickets: list[Ticket]


def receive(kind: str, sends: int) -> None:
    """The other process: reserves, and does nothing until its input ends."""
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.fill_(1)
    transport = _TRANSPORTS[kind]("receiver", arena)
    told = Open(transport.endpoint, [transport.open(0, DIGEST) for _ in range(sends)])
    print(msgspec.json.encode(told).decode(), flush=True)
    sys.stdin.read()
    transport.close_all()


@contextmanager
def receiver(kind: str, sends: int) -> Iterator[Open]:
    command = [sys.executable, "-m", "benchmarks.transfer", "--receive", kind, str(sends)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=Open)
        finally:
            process.stdin.close()
            process.wait()


class Sender:
    """tickets: for one send each. own, peer: [pages, layers, kv_heads] blocks."""

    def __init__(self, kind: str, arena: Arena, told: Open) -> None:
        rng = np.random.default_rng(0)
        self.transport = _TRANSPORTS[kind]("sender", arena)
        self.endpoint = told.endpoint
        self._tickets = iter(told.tickets)
        self.own, self.peer = (_scattered(rng) for _ in range(2))
        self._runs = KVAddress.compress(self.peer)

    async def send(self, parts: int) -> None:
        """All tokens, in several of as many layers as `parts` leaves."""
        address = KVAddress(
            model="m", form=FORM, begin=0, end=TOKENS, blocks=self._runs, ticket=next(self._tickets)
        )
        transfer = self.transport.claim(self.endpoint, address, DIGEST, 0, TOKENS)
        each = FORM.layers // parts
        for layer in range(0, FORM.layers, each):
            transfer.put(self._copies(slice(layer, layer + each)))
        await transfer.arrived()

    def _copies(self, layers: slice) -> BlockCopies:
        own, peer = self.own[:, layers].ravel(), self.peer[:, layers].ravel()
        counts = np.full(SHAPE[0], FORM.tokens_per_block, np.int32)
        counts[-1] = TOKENS - (SHAPE[0] - 1) * FORM.tokens_per_block
        counts = np.repeat(counts, len(own) // SHAPE[0])
        return BlockCopies(own, peer, np.zeros_like(counts), counts)


def _scattered(rng: np.random.Generator) -> I32:
    return rng.permutation(BLOCKS)[: np.prod(SHAPE)].astype(np.int32).reshape(SHAPE)


async def measure_rates(rounds: int, nixl: bool) -> dict[str, list[float]]:
    """Seconds of each way, in turns; a first turn is not counted."""
    arena = Arena(BLOCKS, FORM.block_bytes)
    arena.bytes.random_()
    seconds: dict[str, list[float]] = {}
    with receiver("shm", 2 * (rounds + 1)) as told:
        sender, peer = Sender("shm", arena, told), ShmPeer(told.endpoint)
        ways: dict[str, Way] = {
            "memcpy": lambda: _memcpy(peer, arena),
            "plane": lambda: sender.send(1),
            "by layer": lambda: sender.send(FORM.layers),
        }
        await _take_turns(ways, rounds, seconds)
        sender.transport.close_all()
    if nixl:
        with receiver("nixl", rounds + 1) as told:
            far = Sender("nixl", arena, told)
            await _take_turns({"NIXL": lambda: far.send(1)}, rounds, seconds)
            far.transport.close_all()
    return seconds


async def _take_turns(ways: dict[str, Way], rounds: int, seconds: dict[str, list[float]]) -> None:
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            await way()
            if turn:
                seconds.setdefault(name, []).append(time.perf_counter() - start)


async def _memcpy(peer: ShmPeer, arena: Arena) -> None:
    """As many bytes in one piece, from arena to arena."""
    ctypes.memmove(peer.memory.ctypes.data, arena.bytes.data_ptr(), _bytes())


def _bytes() -> int:
    """Of K and V of the context."""
    return TOKENS * FORM.layers * FORM.kv_heads * 2 * FORM.head_dim * 4


def measure(rounds: int = 30, nixl: bool = False) -> Report:
    seconds = asyncio.run(measure_rates(rounds, nixl))
    rates = {name: _bytes() / median(found) / 1e9 for name, found in seconds.items()}
    share = {name: 100 * rate / rates["memcpy"] for name, rate in rates.items()}
    return Report(
        name="transfer",
        title=f"{TOKENS} tokens of shape A ({_bytes() / 1e6:.0f} MB) between two processes",
        columns=["", "ms", "GB/s", "% of memcpy"],
        rows=[[name, 1e3 * median(seconds[name]), rates[name], share[name]] for name in rates],
        findings=[
            Finding(what=f"{name} against memcpy", value=share[name], unit=" %", least=LEAST)
            for name in ("plane", "by layer")
        ],
        machine=this_machine(),
        raw={"seconds": seconds},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--nixl", action="store_true", help="NIXL too, where it is installed")
    parser.add_argument("--receive", nargs=2, metavar=("KIND", "SENDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive[0], int(options.receive[1]))
        return
    publish(measure(options.rounds, options.nixl))


if __name__ == "__main__":
    main()
