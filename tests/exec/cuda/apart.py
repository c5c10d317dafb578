"""One GPU's executor that prefills, another that decodes, and NIXL in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.router.program import load_program
from kvloom.router.router import Router
from kvloom.transfer.nixl import NixlTransport
from kvloom.transfer.nixl_agent import ArenaPlace
from kvloom.types.clock import WallClock
from kvloom.types.spec import EngineSpec
from tests.checkpoints import VOCAB, WINDOW
from tests.engines import ask, body, running_over
from tests.oracle import Oracle

COUNT = 12
LENGTHS = (1, 33, WINDOW + 1, 70, 150)  # the last ones are more than a chunk


def check_prefilled_apart(
    path: Path,
    spec: EngineSpec,
    load: Callable[[EngineSpec], GpuExecutor],
    place: Callable[[], ArenaPlace],
) -> None:
    """The decoder is sent what it does not compute, and its tokens are transformers' own."""
    oracle = Oracle(path)
    for prompt, tokens in asyncio.run(_answers(spec, load, place)):
        assert len(tokens) == COUNT
        oracle.check(prompt, tokens)


async def _answers(
    spec: EngineSpec, load: Callable[[EngineSpec], GpuExecutor], place: Callable[[], ArenaPlace]
) -> list[tuple[list[int], list[int]]]:
    specs = [replace(spec, unit=unit) for unit in ("prefiller", "decoder")]
    executors = [load(one) for one in specs]
    planes = [
        NixlTransport(one.unit, executor.arena, place())
        for one, executor in zip(specs, executors, strict=True)
    ]
    prompts = [[(7 * i + j) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
    async with (
        running_over(specs[0], executors[0], planes[0]) as prefiller,
        running_over(specs[1], executors[1], planes[1]) as decoder,
        Router(
            {"prefiller": prefiller, "decoder": decoder}, load_program("disaggregate"), WallClock()
        ) as router,
    ):
        answers = await asyncio.gather(*(ask(router, body("m", one, max_tokens=COUNT)) for one in prompts))
        received = (await decoder.load()).models["m"].received_tokens_total
        assert received == sum(length - 1 for length in LENGTHS)
    return [(prompt, answer.tokens[0]) for prompt, answer in zip(prompts, answers, strict=True)]
