"""The KV plane's rate between two processes, against a memcpy's between the same two arenas.

python -m benchmarks.transfer [--nixl]. A context of 2,000 tokens of shape A (12 layers, 12 KV heads, head
size 64, float32), in blocks of 16 KiB scattered over both arenas. All ways take turns in one run; medians.
`plane` is from claim to the receiver's ledger, in one copies; `by layer` is the same in twelve.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping
from statistics import median

import numpy as np

from benchmarks.plane_pair import (
    FORM,
    SIZE,
    TOKENS,
    Sender,
    Way,
    receiver,
    scattered,
    sender_arena,
    take_turns,
)
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.kv.arena import Arena
from kvloom.transfer.shared_memory import ShmPeer

LEAST = 80.0  # percent of memcpy's rate


async def measure_rates(rounds: int, nixl: bool) -> Mapping[str, list[float]]:
    """Returns the seconds of each way."""
    rng = np.random.default_rng(0)
    arena, own, there = sender_arena(), scattered(rng), scattered(rng)
    with receiver("shm", 2 * (rounds + 1)) as told:
        sender, peer = Sender("shm", arena, told), ShmPeer(told.endpoint)
        ways: dict[str, Way] = {
            "memcpy": lambda: _memcpy(peer, arena),
            "plane": lambda: sender.send(own, there),
            "by layer": lambda: sender.send(own, there, FORM.layers),
        }
        seconds = await take_turns(ways, rounds)
        sender.transport.close_all()
    if nixl:
        with receiver("nixl", rounds + 1) as told:
            far = Sender("nixl", arena, told)
            seconds |= await take_turns({"NIXL": lambda: far.send(own, there)}, rounds)
            far.transport.close_all()
    return seconds


async def _memcpy(peer: ShmPeer, arena: Arena) -> None:
    """As many bytes in one piece, from arena to arena."""
    ctypes.memmove(peer.memory.ctypes.data, arena.bytes.data_ptr(), SIZE)


def measure(rounds: int = 30, nixl: bool = False) -> Report:
    seconds = asyncio.run(measure_rates(rounds, nixl))
    rates = {name: SIZE / median(found) / 1e9 for name, found in seconds.items()}
    share = {name: 100 * rate / rates["memcpy"] for name, rate in rates.items()}
    return Report(
        name="transfer",
        title=f"{TOKENS} tokens of shape A ({SIZE / 1e6:.0f} MB) between two processes",
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
    options = parser.parse_args()
    publish(measure(options.rounds, options.nixl))


if __name__ == "__main__":
    main()
