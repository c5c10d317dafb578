"""Prompt tokens that two engines compute for requests with common beginnings, under two router programs.

python -m benchmarks.shared_prefix [--trace conversation.jsonl] [--pools 0.5 0.75 1]. Synthetic: documents,
each asked about many times, in any order; and conversations of several turns, each of which begins with all
before it. A trace has one request a line with `hash_ids`, one for each 512 tokens of the prompt, equal ids
meaning equal tokens (the form of Mooncake's); its blocks become 16 tokens. Real engines over shape B, in
processes of their own; each holds a part (`--pools`) of what all contexts take. `at best` is what one engine
with room for everything would compute.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.engines import MODEL, engines
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from kvloom.router.client import HttpEngineClient
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.types.clock import WallClock
from kvloom.types.request import SamplingParams, StartGenerate
from kvloom.types.verbs import Prefix

PROGRAMS = ("data_parallel", "cache_aware")
LEAST = 2.0
AT_ONCE, OUTPUT, VOCAB = 8, 4, 8000
BLOCK, LONGEST = 16, 900  # tokens that a trace's block is scaled to, and of a prompt
SAID = 64  # tokens of a turn
DOCUMENT, ASKED = 512, 32  # tokens of a document, and of a question about it
TOKEN_BYTES = 2 * 6 * 4 * 64 * 4  # K and V of a token of shape B


class Line(msgspec.Struct):
    """Of a trace."""

    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Effort:
    """Documents and conversations, questions or turns of each, requests of a trace, and what an engine holds
    of all contexts."""

    talks: int = 40
    turns: int = 12
    traced: int = 600
    pools: tuple[float, ...] = (0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Seen:
    computed: int
    cached: int
    seconds: float


def talks(effort: Effort) -> list[list[int]]:
    """Prompts of all turns, the conversations shuffled into each other."""
    rng = random.Random(1)
    contexts: list[list[int]] = [[] for _ in range(effort.talks)]
    order = [talk for talk in range(effort.talks) for _ in range(effort.turns)]
    rng.shuffle(order)
    out = []
    for talk in order:
        contexts[talk] = contexts[talk] + [rng.randrange(300, VOCAB) for _ in range(SAID)]
        out.append(contexts[talk])
    return out


def documents(effort: Effort) -> list[list[int]]:
    """A document and a question each, in any order."""
    rng = random.Random(2)
    texts = [[rng.randrange(300, VOCAB) for _ in range(DOCUMENT)] for _ in range(effort.talks)]
    order = [text for text in texts for _ in range(effort.turns)]
    rng.shuffle(order)
    return [text + [rng.randrange(300, VOCAB) for _ in range(ASKED)] for text in order]


def traced(path: Path, effort: Effort) -> list[list[int]]:
    out = []
    with path.open("rb") as lines:
        for line, _ in zip(lines, range(effort.traced), strict=False):
            ids = msgspec.json.decode(line, type=Line).hash_ids
            prompt = [token for one in ids for token in _block(one)]
            out.append(prompt[:LONGEST])
    return out


def _block(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(300, VOCAB) for _ in range(BLOCK)]


def distinct(prompts: Sequence[list[int]]) -> int:
    """Tokens that no other prompt has after the same beginning, a block at a time."""
    starts = {tuple(prompt[: i + BLOCK]) for prompt in prompts for i in range(0, len(prompt), BLOCK)}
    return len(starts) * BLOCK


async def serve_all(router: Router, prompts: Sequence[list[int]]) -> float:
    """Seconds for all, in order, AT_ONCE at a time."""
    queue = list(enumerate(prompts))[::-1]
    began = time.perf_counter()

    async def worker() -> None:
        while queue:
            number, prompt = queue.pop()
            sampling = SamplingParams(max_tokens=OUTPUT, seed=0)
            body = StartGenerate(
                model=MODEL,
                request=f"{router.program.name}-{number}",
                prompt=prompt,
                sampling=sampling,
                interval=8,
            )
            async with aclosing(router.start_generate(body)) as frames:
                async for _ in frames:
                    pass

    await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
    return time.perf_counter() - began


async def compare(clients: dict[str, HttpEngineClient], prompts: Sequence[list[int]]) -> dict[str, Seen]:
    """Each with a router of its own: one that served before would look for prefixes that are gone."""
    out = {}
    for name in PROGRAMS:
        for client in clients.values():
            await client.evict(Prefix(model=MODEL, prompt=[]))
        async with Router(clients, load_program(name), WallClock()) as router:
            before = await _count(router)
            seconds = await serve_all(router, prompts)
            after = await _count(router)
            out[name] = Seen(after[0] - before[0], after[1] - before[1], seconds)
    return out


async def _count(router: Router) -> tuple[int, int]:
    """Tokens of prompts computed, and found in a cache."""
    loads = [load.models[MODEL] for load in (await router.loads()).values()]
    return sum(one.prompt_tokens_total for one in loads), sum(one.cached_tokens_total for one in loads)


async def measure(trace: Path | None, console: Console, effort: Effort | None = None) -> Report:
    """trace: a file, where there is one."""
    machine, effort = this_machine(), effort or Effort()
    workloads = {"documents": documents(effort), "conversations": talks(effort)}
    if trace:
        workloads["trace"] = traced(trace, effort)
    rows: list[list[str | int | float | None]] = []
    findings = []
    for name, prompts in workloads.items():
        asked, at_best = sum(map(len, prompts)), distinct(prompts)
        for pool in effort.pools:
            what = f"{name}, pools of {pool:g}"
            console.print(what, style="dim")
            async with engines(2, "B", kv_bytes=int(pool * at_best) * TOKEN_BYTES) as pair:
                seen = await compare({f"unit-{i}": client for i, client in enumerate(pair)}, prompts)
            for program, one in seen.items():
                rows.append([f"{what}, {program}", asked, at_best, one.computed, one.cached, one.seconds])
            ratio = seen[PROGRAMS[0]].computed / seen[PROGRAMS[1]].computed
            findings.append(Finding(what=f"{what}: less prompt computed", value=ratio, unit="×", least=LEAST))
    return Report(
        name="shared-prefix",
        title="Prompts with common beginnings over two engines",
        columns=["", "prompt tokens", "at best", "computed", "cached", "seconds"],
        rows=rows,
        findings=findings,
        machine=machine,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--pools", type=float, nargs="+", default=list(Effort().pools))
    options = parser.parse_args()
    console = Console()
    publish(asyncio.run(measure(options.trace, console, Effort(pools=tuple(options.pools)))), console)


if __name__ == "__main__":
    main()
