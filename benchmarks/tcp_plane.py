"""The rates of the KV plane's ways between two hosts, against plain copies over sockets.

python -m benchmarks.tcp_plane [--rounds N] [--here]. A context of 2,000 tokens of shape A (147 MB) in blocks
of 16 KiB goes between two network namespaces, which are made for the run; with `--here`, or where none can be
made, between two processes over loopback. All ways take turns in one run;
medians. `socket` sends as many bytes from one buffer into another over one connection, `sockets` over as many
as the plane has; `iperf3` is what that reports, if it is installed. Blocks are adjacent in both arenas, or
scattered over both. NIXL sends them fused; not fused (adjacent, but in reverse order in one of the arenas, so
that no two are neighbours in both); and staged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Final

import msgspec
import numpy as np
from tests.hosts.hosts import NoHosts, hosts

from benchmarks.plane_pair import (
    BLOCKS,
    LOOPBACK,
    SIZE,
    TOKENS,
    Sender,
    Told,
    Way,
    adjacent,
    environment,
    receiver,
    scattered,
    sender_arena,
    take_turns,
)
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.transfer.tcp import LINKS
from kvloom.types.geometry import I32

LEAST: Final = 70.0  # percent of the sockets' rate
GAIN: Final = 2.0  # times the rate of blocks that go by a descriptor each
IPERF_SECONDS: Final = 2


class Sockets:
    """Plain connections to the receiver."""

    def __init__(self, host: str, port: int, count: int, memory: memoryview) -> None:
        self._sockets = [socket.create_connection((host, port)) for _ in range(count)]
        self._memory = memory[: SIZE // count]

    async def send(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._send, sock) for sock in self._sockets))

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _send(self, sock: socket.socket) -> None:
        sock.sendall(len(self._memory).to_bytes(8, "little"))
        sock.sendall(self._memory)
        sock.recv(1)


def routes() -> dict[str, dict[str, tuple[I32, I32]]]:
    """Returns by each kind of transport what it sends: from which blocks to which, always the same ones."""
    rng = np.random.default_rng(0)
    beside = adjacent()
    reversed_ = (BLOCKS - 1 - beside).astype(np.int32)
    apart = scattered(rng), scattered(rng)
    found = {"tcp": {"adjacent": (beside, beside), "scattered": apart}}
    if find_spec("nixl_cu13") is not None:
        found["nixl"] = {
            "adjacent, fused": (beside, beside),
            "adjacent, not fused": (beside, reversed_),
            "scattered": apart,
        }
        found["nixl-staged"] = {"scattered, staged": apart}
    return found


async def measure_rates(rounds: int, told: Mapping[str, Told]) -> dict[str, list[float]]:
    """Returns the seconds of each way. told: the receivers."""
    arena = sender_arena()
    memory = arena.bytes.numpy().data
    ways: dict[str, Way] = {}
    with ExitStack() as stack:
        for kind, sends in routes().items():
            sender = Sender(kind, arena, told[kind])
            stack.callback(sender.transport.close_all)
            for what, (own, peer) in sends.items():
                ways[f"{kind.partition('-')[0]}, {what}"] = partial(sender.send, own, peer)
        for name, count in (("socket", 1), ("sockets", LINKS)):
            plain = Sockets(told["tcp"].host, told["tcp"].port, count, memory)
            stack.callback(plain.close)
            ways[name] = plain.send
        return await take_turns(ways, rounds)


def iperf3(host: str, here: Sequence[str], there: Sequence[str]) -> float | None:
    """Returns the bytes a second that iperf3 reaches over as many connections as the plane has; None if it is
    not installed. here, there: the commands that start something at either end."""
    if shutil.which("iperf3") is None:
        return None
    with subprocess.Popen([*there, "iperf3", "-s", "--forceflush"], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            while b"listening" not in server.stdout.readline():
                pass
            command = [*here, "iperf3", "-c", host, "-P", str(LINKS), "-t", str(IPERF_SECONDS), "-J"]
            done = subprocess.run(command, check=True, capture_output=True, timeout=60)
            return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
        finally:
            server.terminate()


def measure(rounds: int = 30, *, here: bool = False) -> Report:
    if here:
        return _measure(rounds, LOOPBACK, (), (), "two processes")
    try:
        with hosts(2) as [one, other]:
            return _measure(rounds, other.address, one.command(), other.command(), "two network namespaces")
    except NoHosts as error:
        report = _measure(rounds, LOOPBACK, (), (), "two processes")
        report.notes.append(str(error))
        return report


def _measure(rounds: int, host: str, here: Sequence[str], there: Sequence[str], where: str) -> Report:
    """host: where the receivers listen. here, there: the commands that start something at either end."""
    with ExitStack() as stack:
        told = {
            kind: stack.enter_context(receiver(kind, len(sends) * (rounds + 1), host, there))
            for kind, sends in routes().items()
        }
        command = [*here, sys.executable, "-m", "benchmarks.tcp_plane", "--send", str(rounds)]
        given = msgspec.json.encode(told)
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True, env=environment())
        seconds = msgspec.json.decode(done.stdout, type=dict[str, list[float]])
    rates = {name: SIZE / median(found) / 1e9 for name, found in seconds.items()}
    plain = max(rates["socket"], rates["sockets"])
    rows: list[list[str | int | float | None]] = [
        [name, 1e3 * median(seconds[name]), rates[name], 100 * rates[name] / plain] for name in rates
    ]
    findings = [
        Finding(
            what=f"{name} blocks by TCP against sockets",
            value=100 * rates[f"tcp, {name}"] / plain,
            unit=" %",
            least=LEAST,
        )
        for name in ("adjacent", "scattered")
    ]
    if "nixl, scattered" in rates:
        gains = {
            "fusion of adjacent blocks": ("nixl, adjacent, fused", "nixl, adjacent, not fused"),
            "staging of scattered blocks": ("nixl, scattered, staged", "nixl, scattered"),
        }
        findings += [
            Finding(what=f"NIXL with {what}", value=rates[one] / rates[other], unit=" x", least=GAIN)
            for what, (one, other) in gains.items()
        ]
    reached = iperf3(host, here, there)
    if reached is not None:
        rows.append(["iperf3", None, reached / 1e9, 100 * reached / 1e9 / plain])
    return Report(
        name="tcp-plane",
        title=f"{TOKENS} tokens of shape A ({SIZE / 1e6:.0f} MB) between {where}",
        columns=["", "ms", "GB/s", "% of the faster sockets"],
        rows=rows,
        findings=findings,
        machine=this_machine(),
        notes=[] if reached is not None else ["iperf3 is not installed."],
        raw={"seconds": seconds},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--here", action="store_true", help="over loopback, without another namespace")
    parser.add_argument("--send", type=int, metavar="ROUNDS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        told = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Told])
        print(json.dumps(asyncio.run(measure_rates(options.send, told))))
        return
    publish(measure(options.rounds, here=options.here))


if __name__ == "__main__":
    main()
