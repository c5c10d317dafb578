"""What moving a context saves, and what it costs those who go on beside it.

python -m benchmarks.migration. Two engine processes, one core each, shape A. Microserving's figure 12 on a
CPU: a context lies at one engine, a request with it and 200 new tokens comes to the other; the time to its
first token with the context moved there, and computed again, in turn. Then what of a transfer is hidden
behind the prefill that it follows layer by layer, and what a decode at the receiver feels of one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from statistics import median

from rich.console import Console

from benchmarks.engines import MODEL, engines, spec_of
from benchmarks.moving_pair import prompt_of
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import TorchExecutor
from kvloom.kv.arena import Arena
from kvloom.router.client import HttpEngineClient
from kvloom.transfer.fenced import FencedTransfer
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.address import Endpoint, KVAddress
from kvloom.types.client import EngineClient
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec
from kvloom.types.verbs import Prefix, PrepRecv, RemoteSend, Sent

WANTED = {500: 1.7, 1500: 4.0, 2500: 6.0}  # context tokens → how much faster with migration
NEW, MOVED = 200, 2000
TOKEN_BYTES = 2 * 12 * 12 * 64 * 4  # K and V of a token of shape A
AT_ONCE, APART = 4, 0.3  # contexts sent one after the other, and seconds of decoding before and after
HIDDEN, SLOWER = 0.9, 1.05
_names = itertools.count()


def _body(prompt: list[int], tokens: int, begin: int = 0, request: str | None = None) -> StartGenerate:
    return StartGenerate(
        model=MODEL,
        request=request or f"b{next(_names)}",
        prompt=prompt,
        begin=begin,
        sampling=SamplingParams(max_tokens=tokens, seed=0),
    )


async def _first(engine: HttpEngineClient, body: StartGenerate) -> None:
    """Until the first token."""
    async with aclosing(engine.start_generate(body)) as frames:
        async for frame in frames:
            if any(isinstance(event, TokenEvent) for event in frame):
                return


async def _move(source: EngineClient, target: HttpEngineClient, prompt: list[int], request: str) -> Sent:
    spot = await target.prep_recv(PrepRecv(model=MODEL, request=request, prompt=prompt))
    return await source.remote_send(
        RemoteSend(
            model=MODEL,
            request=request,
            prompt=prompt,
            address=spot.address,
            peer=spot.peer,
            begin=spot.matched,
        )
    )


async def _prepared(target: HttpEngineClient, prompt: list[int]) -> RemoteSend:
    request = f"p{next(_names)}"
    spot = await target.prep_recv(PrepRecv(model=MODEL, request=request, prompt=prompt))
    return RemoteSend(model=MODEL, request=request, prompt=prompt, address=spot.address, peer=spot.peer)


async def _clear(*all_engines: HttpEngineClient) -> None:
    for engine in all_engines:
        await engine.evict(Prefix(model=MODEL, prompt=[]))


async def resume(a: HttpEngineClient, b: HttpEngineClient, context: int, rounds: int) -> tuple[float, float]:
    """Seconds to the first token at b, with the context moved from a and computed again."""
    moved, again = [], []
    for _ in range(rounds + 1):
        await _clear(a, b)
        prompt = prompt_of(context)
        await _first(a, _body(prompt, 1))
        whole, request = prompt + prompt_of(NEW), f"m{next(_names)}"
        began = time.perf_counter()
        sent = await _move(a, b, prompt, request)
        await _first(b, _body(whole, 1, begin=context, request=request))
        moved.append(time.perf_counter() - began)
        if sent.computed > 1:
            raise RuntimeError(f"{sent.computed} tokens of a cached context were computed again")
        fresh = prompt_of(context + NEW)
        began = time.perf_counter()
        await _first(b, _body(fresh, 1))
        again.append(time.perf_counter() - began)
    return median(moved[1:]), median(again[1:])


class TimedTransport(ShmTransport):
    """waits: of each transfer, how long it was waited for once all of it was on its way."""

    def __init__(self, unit: str, arena: Arena) -> None:
        super().__init__(unit, arena)
        self.waits: list[float] = []

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> FencedTransfer:
        transfer = super().claim(peer, address, digest, begin, end)
        arrived = transfer.arrived

        async def timed() -> None:
            began = time.perf_counter()
            await arrived()
            self.waits.append(time.perf_counter() - began)

        transfer.arrived = timed  # type: ignore[method-assign]
        return transfer


async def overlap(rounds: int) -> tuple[float, float]:
    """Seconds that a transfer is waited for: after the prefill that it followed, and by itself."""
    behind: list[float] = []
    alone: list[float] = []
    spec = spec_of("A", "unit-1", kv_bytes=1 << 30, threads=1)
    async with engines(1, "A") as (b,), in_this_process(spec) as (a, transport):
        for _ in range(rounds + 1):
            prompt = prompt_of(MOVED)
            for waits in (behind, alone):
                await b.evict(Prefix(model=MODEL, prompt=[]))
                request, before = f"o{next(_names)}", len(transport.waits)
                await _move(a, b, prompt, request)
                waits.append(transport.waits[before])
                await b.abort(request)
    return median(behind[1:]), median(alone[1:])


@asynccontextmanager
async def in_this_process(spec: EngineSpec) -> AsyncIterator[tuple[Engine, TimedTransport]]:
    executor = TorchExecutor.load(
        spec.models, kv_bytes=spec.kv_bytes, block_bytes=spec.block_bytes, threads=spec.threads
    )
    transport = TimedTransport(spec.unit, executor.arena)
    engine = Engine(executor, transport, spec, WallClock())
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine, transport
        finally:
            engine.stop()
    transport.close_all()
    executor.close()


async def beside(a: HttpEngineClient, b: HttpEngineClient, moves: int) -> tuple[float, float, float]:
    """Seconds a token of a decode at b: alone, while contexts arrive from a one after the other, and while a
    process that has nothing to do with either copies as many bytes of its own."""
    await _clear(a, b)
    prompt = prompt_of(MOVED)
    await _first(a, _body(prompt, 1))
    times: list[float] = []
    arriving: list[tuple[float, float]] = []
    copying: list[tuple[float, float]] = []
    under_way, stop = asyncio.Event(), asyncio.Event()

    async def decode() -> None:
        async with aclosing(b.start_generate(_body(prompt_of(64), 1600))) as frames:
            async for frame in frames:
                times.extend(time.perf_counter() for e in frame if isinstance(e, TokenEvent))
                if len(times) > 20:
                    under_way.set()
                if stop.is_set():
                    return

    async with asyncio.TaskGroup() as group, bystander() as copy:
        group.create_task(decode())
        await under_way.wait()
        for _ in range(moves):
            sends = [await _prepared(b, prompt) for _ in range(AT_ONCE)]
            await asyncio.sleep(APART)
            began = time.perf_counter()
            for send in sends:  # reserved before: what is timed is the plane's work
                await a.remote_send(send)
            arriving.append((began, time.perf_counter()))
            await asyncio.sleep(APART)
            for send in sends:
                await b.abort(send.request)
            await _clear(b)
            await asyncio.sleep(APART)
            began = time.perf_counter()
            await copy()
            copying.append((began, time.perf_counter()))
        stop.set()
    alone, during = _pace(times[10:], arriving, arriving + copying)
    return alone, during, _pace(times[10:], copying, arriving + copying)[1]


_COPIES = """
import sys
import numpy
source = numpy.ones({bytes}, numpy.uint8)
target = source.copy()
print(flush=True)
for _ in sys.stdin:
    for _ in range({times}):
        target[:] = source
    print(flush=True)
"""


@asynccontextmanager
async def bystander(
    size: int = MOVED * TOKEN_BYTES, times: int = AT_ONCE
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A call that has a process of its own copy so many bytes so many times."""
    program = _COPIES.format(bytes=size, times=times)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    await stdout.readline()

    async def copy() -> None:
        stdin.write(b"\n")
        await stdout.readline()

    try:
        yield copy
    finally:
        stdin.close()
        await process.wait()


def _pace(
    times: list[float], spans: list[tuple[float, float]], busy: list[tuple[float, float]]
) -> tuple[float, float]:
    """Mean seconds a token outside of all `busy` spans, and inside of `spans`."""
    inside, outside = [], []
    for before, after in itertools.pairwise(times):
        if any(begin < after and before < end for begin, end in spans):
            inside.append(after - before)
        elif not any(begin < after and before < end for begin, end in busy):
            outside.append(after - before)
    return sum(outside) / len(outside), sum(inside) / len(inside)


async def measure(rounds: int, console: Console, contexts: Sequence[int] = tuple(WANTED)) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    findings = []
    async with engines(2, "A", kv_bytes=2 << 30) as (a, b):
        for context in contexts:
            console.print(f"a context of {context} tokens", style="dim")
            moved, again = await resume(a, b, context, rounds)
            rows.append([context, 1e3 * moved, 1e3 * again, again / moved])
            findings.append(
                Finding(what=f"{context} tokens: migrated against computed again", value=again / moved,
                        unit="×", least=WANTED[context])
            )  # fmt: skip
        console.print("beside a decode", style="dim")
        alone, during, control = await beside(a, b, 4 * rounds)
    console.print("transfers behind computing", style="dim")
    behind, transfer = await overlap(rounds)
    hidden = 100 * (1 - behind / transfer)
    findings += [
        Finding(what=f"hidden of the transfer of {MOVED} computed tokens", value=hidden, unit=" %",
                least=100 * HIDDEN),
        Finding(what=f"transfer of {MOVED} cached tokens by itself", value=1e3 * transfer, unit=" ms"),
        Finding(what="waited for after the prefill that it follows", value=1e3 * behind, unit=" ms"),
        Finding(what="time per token at the receiver while contexts arrive, against alone",
                value=during / alone, unit="×", most=SLOWER),
        Finding(what="the same while a process of its own copies as many bytes", value=control / alone,
                unit="×"),
    ]  # fmt: skip
    return Report(
        name="migration",
        title=f"First token of a request with a context and {NEW} new tokens (ms)",
        columns=["context", "migrated", "computed again", "ratio"],
        rows=rows,
        findings=findings,
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    publish(asyncio.run(measure(options.rounds, console)), console)


if __name__ == "__main__":
    main()
