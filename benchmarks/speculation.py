"""The pace of requests with drafts by n-grams against the same engine without, and whether tokens are alike.

python -m benchmarks.speculation [--shape A] [--rounds 5] [--requests 0]. Two engines in this process have the
same random checkpoint; one speculates. They take the same requests in turns, and a ratio is the median of the
rounds' ratios. Texts: `repeats`, greedy, which goes round in circles as random weights with tied embeddings
do; `random`, in which nothing comes twice; `few tokens`, random out of 8 tokens, so that n-grams are found
all the time and foretell nothing. --requests: as many short requests of all these kinds, of both engines, 16
at a time, whose tokens are compared.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any, Final

from msgspec.structs import replace
from rich.console import Console

from benchmarks.engines import MODEL, spec_of
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate, TokenEvent
from kvloom.types.transfer import NoTransport

WORDS: Final = 8000  # of the vocabulary, from which prompts are drawn
MANY: Final = 16
LEAST_REPEATED: Final = 1.6
LEAST: Final = 0.97


def _bodies(kind: str, seed: int, count: int, tokens: int) -> list[StartGenerate]:
    rng, made = random.Random(seed), list[StartGenerate]()
    for i in range(count):
        prompt = [rng.randrange(300, WORDS) for _ in range(40)]
        more: dict[str, Any] = {}
        if kind == "random":
            more = {"temperature": 1.5}
        if kind == "few tokens":
            more = {"temperature": 1.0, "logit_bias": dict.fromkeys(prompt[:8], 100.0)}
        sampling = SamplingParams(max_tokens=tokens, seed=seed + i, **more)
        made.append(
            StartGenerate(model=MODEL, request=f"{kind}-{seed}-{i}", prompt=prompt, sampling=sampling)
        )
    return made


async def _tokens(engine: Engine, body: StartGenerate) -> list[int]:
    return [
        event.token
        async for frame in engine.start_generate(body)
        for event in frame
        if isinstance(event, TokenEvent)
    ]


async def _seconds(engine: Engine, bodies: list[StartGenerate]) -> tuple[float, list[list[int]]]:
    """Returns the seconds from the first token's request to the last token, of all together."""
    began = time.perf_counter()
    found = await asyncio.gather(*(_tokens(engine, body) for body in bodies))
    return time.perf_counter() - began, found


@asynccontextmanager
async def _engine(shape: str, how: str, threads: int) -> AsyncIterator[Engine]:
    spec = spec_of(shape, f"unit-{how}", kv_bytes=512 << 20, threads=threads)
    spec = replace(spec, models=(replace(spec.models[0], speculation=how),))
    executor = load_executor(spec)
    engine = Engine(executor, NoTransport(spec.unit), spec, WallClock())
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
    executor.close()


CASES: Final = (
    ("repeats", 1),
    ("random", 1),
    ("few tokens", 1),
    ("repeats", MANY),
    ("random", MANY),
    ("few tokens", MANY),
)


async def measure(shape: str, rounds: int, requests: int, threads: int, tokens: int) -> Report:
    rows, findings, raw = list[list[Cell]](), list[Finding](), dict[str, object]()
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_engine(shape, "none", threads))
        drafting = await stack.enter_async_context(_engine(shape, "ngram", threads))
        for kind, count in CASES:
            ratios, paces = list[float](), list[float]()
            for seed in range(rounds + 1):
                bodies = _bodies(kind, 1000 * seed + count, count, tokens)
                sides = (plain, drafting) if seed % 2 else (drafting, plain)
                took = {id(side): await _seconds(side, bodies) for side in sides}
                if seed:  # the first round warms both
                    ratios.append(took[id(plain)][0] / took[id(drafting)][0])
                    paces.append(count * tokens / took[id(plain)][0])
            name, ratio = f"{kind}, {count} at a time", median(ratios)
            rows.append([name, median(paces), median(paces) * ratio, ratio])
            least = LEAST_REPEATED if (kind, count) == ("repeats", 1) else LEAST
            findings.append(Finding(what=name, value=ratio, unit="×", least=least))
            raw[name] = ratios
        if requests:
            findings += await _compared(plain, drafting, requests)
    return Report(
        name="speculation",
        title=f"Tokens a second without drafts and with them, shape {shape}",
        columns=["", "none", "ngram", "ratio"],
        rows=rows,
        findings=findings,
        machine=this_machine(),
        raw=raw,
    )


async def _compared(plain: Engine, drafting: Engine, requests: int) -> list[Finding]:
    kinds, unlike = ("repeats", "random", "few tokens"), 0
    for at in range(0, requests, MANY):
        bodies = [
            _bodies(kinds[i % 3], 7_000_000 + at + i, 1, 24)[0] for i in range(min(MANY, requests - at))
        ]
        (_, one), (_, other) = await _seconds(plain, bodies), await _seconds(drafting, bodies)
        unlike += sum(a != b for a, b in zip(one, other, strict=True))
    load = (await drafting.load()).models[MODEL]
    return [
        Finding(what=f"of {requests:,} requests have other tokens", value=unlike, most=0),
        Finding(what="drafted tokens", value=load.drafted_tokens_total),
        Finding(what="of them right", value=load.accepted_tokens_total, least=1),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="A")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    o = parser.parse_args()
    publish(asyncio.run(measure(o.shape, o.rounds, o.requests, o.threads, o.tokens)), Console())


if __name__ == "__main__":
    main()
