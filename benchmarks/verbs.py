"""A verb's round trip without work, and how many an engine answers.

python -m benchmarks.verbs. The real verbs and server in a process of their own, over TCP on loopback and over
a socket file; `renew` of nothing would be an error, so the verb is `abort` of an unknown request.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.router.client import HttpEngineClient

MOST_MS, LEAST_RATE, CALLERS = 1.0, 3000.0, 64


async def lone(client: HttpEngineClient, calls: int) -> list[float]:
    """Milliseconds of each call."""
    out = []
    for i in range(calls + 50):
        began = time.perf_counter()
        await client.abort(f"nobody-{i}")
        out.append(1e3 * (time.perf_counter() - began))
    return sorted(out[50:])


async def many(client: HttpEngineClient, calls: int) -> float:
    """Calls a second of CALLERS callers at once."""

    async def caller(number: int) -> None:
        for i in range(calls // CALLERS):
            await client.abort(f"nobody-{number}-{i}")

    await asyncio.gather(*[caller(i) for i in range(CALLERS)])
    began = time.perf_counter()
    await asyncio.gather(*[caller(i) for i in range(CALLERS)])
    return calls // CALLERS * CALLERS / (time.perf_counter() - began)


async def measure(calls: int, rounds: int) -> Report:
    machine = this_machine()
    with tempfile.TemporaryDirectory() as folder:
        path, secret = Path(folder) / "unit-0.sock", secrets.token_hex(16)
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.null_engine", "--folder", folder, "--secret", secret,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert engine.stdout is not None
            if await engine.stdout.readline() != b"ready\n":
                raise RuntimeError("the null engine did not start")
            async with HttpEngineClient(f"unix://{path}", secret=secret) as client:
                times = [await lone(client, calls) for _ in range(rounds)]
                rates = [await many(client, calls) for _ in range(rounds)]
        finally:
            engine.terminate()
            await engine.wait()
    p50 = median(median(one) for one in times)
    p99 = median(one[int(0.99 * len(one))] for one in times)
    rate = median(rates)
    return Report(
        name="verbs",
        title="A verb without work, over loopback",
        columns=["", "p50 ms", "p99 ms", "calls/s"],
        rows=[["a lone caller", p50, p99, 1e3 / p50], [f"{CALLERS} callers", None, None, rate]],
        findings=[
            Finding(what="round trip, lone caller, p50", value=p50, unit=" ms", most=MOST_MS),
            Finding(
                what=f"calls to one engine from {CALLERS} callers", value=rate, unit="/s", least=LEAST_RATE
            ),
        ],
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=int, default=6400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(measure(options.calls, options.rounds))
    publish(report)


if __name__ == "__main__":
    main()
