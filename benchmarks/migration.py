"""What moving a context saves, and what it costs those who go on beside it.

python -m benchmarks.migration. Two engine processes, one core each, shape A. Microserving's figure 12 on a
CPU: a context lies at one engine, a request with it and 200 new tokens comes to the other; the time to its
first token with the context moved there, and computed again, in turn. Then what of a transfer is hidden
behind the prefill that it follows layer by layer, and what a decode at the receiver feels of one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from benchmarks.engines import MODEL, engines
from benchmarks.report import Finding, Report, this_machine
from kvloom.core.request import StartGenerate, TokenEvent
from kvloom.core.sampling import SamplingParams
from kvloom.core.verbs import Prefix, PrepRecv, RemoteSend, Sent
from kvloom.router.client import HttpEngineClient

WANTED = {500: 1.7, 1500: 4.0, 2500: 6.0}  # context tokens → how much faster with migration
NEW, MOVED, VOCAB = 200, 2000, 8000
HIDDEN, SLOWER = 0.9, 1.05
_names = itertools.count()
_random = random.Random(0)


def _prompt(length: int) -> list[int]:
    return [_random.randrange(300, VOCAB) for _ in range(length)]


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


async def _move(source: HttpEngineClient, target: HttpEngineClient, prompt: list[int], request: str) -> Sent:
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


async def _clear(*all_engines: HttpEngineClient) -> None:
    for engine in all_engines:
        await engine.evict(Prefix(model=MODEL, prompt=[]))


async def resume(a: HttpEngineClient, b: HttpEngineClient, context: int, rounds: int) -> tuple[float, float]:
    """Seconds to the first token at b, with the context moved from a and computed again."""
    moved, again = [], []
    for _ in range(rounds + 1):
        await _clear(a, b)
        prompt = _prompt(context)
        await _first(a, _body(prompt, 1))
        whole, request = prompt + _prompt(NEW), f"m{next(_names)}"
        began = time.perf_counter()
        sent = await _move(a, b, prompt, request)
        await _first(b, _body(whole, 1, begin=context, request=request))
        moved.append(time.perf_counter() - began)
        if sent.computed > 1:
            raise RuntimeError(f"{sent.computed} tokens of a cached context were computed again")
        fresh = _prompt(context + NEW)
        began = time.perf_counter()
        await _first(b, _body(fresh, 1))
        again.append(time.perf_counter() - began)
    return median(moved[1:]), median(again[1:])


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds: a prefill, a prefill whose K and V are sent on, and the transfer by itself."""

    compute: float
    both: float
    transfer: float

    @property
    def hidden(self) -> float:
        return 1 - max(0.0, self.both - self.compute) / self.transfer


async def overlap(a: HttpEngineClient, b: HttpEngineClient, rounds: int) -> Overlap:
    computes, boths, transfers = [], [], []
    for _ in range(rounds + 1):
        await _clear(a, b)
        prompt = _prompt(MOVED)
        began = time.perf_counter()
        await _first(a, _body(_prompt(MOVED), 1))
        computes.append(time.perf_counter() - began)
        request = f"o{next(_names)}"
        began = time.perf_counter()
        await _move(a, b, prompt, request)
        boths.append(time.perf_counter() - began)
        await b.abort(request)
        await _clear(b)
        request = f"o{next(_names)}"
        began = time.perf_counter()
        await _move(a, b, prompt, request)
        transfers.append(time.perf_counter() - began)
        await b.abort(request)
    return Overlap(median(computes[1:]), median(boths[1:]), median(transfers[1:]))


async def beside(a: HttpEngineClient, b: HttpEngineClient, moves: int) -> tuple[float, float]:
    """Seconds a token of a decode at b: alone, and while contexts arrive from a, one after the other."""
    await _clear(a, b)
    prompt = _prompt(MOVED)
    await _first(a, _body(prompt, 1))
    times: list[float] = []
    spans: list[tuple[float, float]] = []
    under_way, stop = asyncio.Event(), asyncio.Event()

    async def decode() -> None:
        async with aclosing(b.start_generate(_body(_prompt(64), 1200))) as frames:
            async for frame in frames:
                times.extend(time.perf_counter() for e in frame if isinstance(e, TokenEvent))
                if len(times) > 20:
                    under_way.set()
                if stop.is_set():
                    return

    async with asyncio.TaskGroup() as group:
        group.create_task(decode())
        await under_way.wait()
        for _ in range(moves):
            request = f"s{next(_names)}"
            began = time.perf_counter()
            await _move(a, b, prompt, request)
            spans.append((began, time.perf_counter()))
            await b.abort(request)
            await _clear(b)
            await asyncio.sleep(2 * (spans[-1][1] - spans[-1][0]))
        stop.set()
    return _pace(times[10:], spans)


def _pace(times: list[float], spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean seconds a token outside and inside of `spans`."""
    inside = outside = 0.0
    tokens_in = tokens_out = 0
    for before, after in itertools.pairwise(times):
        if any(begin < after and before < end for begin, end in spans):
            inside, tokens_in = inside + after - before, tokens_in + 1
        else:
            outside, tokens_out = outside + after - before, tokens_out + 1
    return outside / tokens_out, inside / tokens_in


async def measure(rounds: int, console: Console) -> Report:
    machine = this_machine()
    rows: list[list[str | int | float | None]] = []
    findings = []
    async with engines(2, "A") as (a, b):
        for context, wanted in WANTED.items():
            console.print(f"a context of {context} tokens", style="dim")
            moved, again = await resume(a, b, context, rounds)
            rows.append([context, 1e3 * moved, 1e3 * again, again / moved])
            findings.append(
                Finding(what=f"{context} tokens: migrated against computed again", value=again / moved,
                        unit="×", least=wanted)
            )  # fmt: skip
        console.print("transfers behind computing, and beside a decode", style="dim")
        seen = await overlap(a, b, rounds)
        alone, during = await beside(a, b, 4 * rounds)
    findings += [
        Finding(what=f"hidden of the transfer of {MOVED} computed tokens", value=100 * seen.hidden, unit=" %",
                least=100 * HIDDEN),
        Finding(what=f"transfer of {MOVED} cached tokens by itself", value=1e3 * seen.transfer, unit=" ms"),
        Finding(what="time per token at the receiver while contexts arrive, against alone",
                value=during / alone, unit="×", most=SLOWER),
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    report = asyncio.run(measure(options.rounds, console))
    report.show(console)
    console.print(report.save())


if __name__ == "__main__":
    main()
