"""An idle model's share serves the busy one, and comes back at once when it wakes: nothing is set for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvloom.engine.engine import Engine
from kvloom.types.request import TokenEvent
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import Answer, ask, body, running, spec_of
from tests.oracle import Oracle

BLOCK = 2048
BLOCKS = 400
FIRST_TOKEN_JOBS = 8  # preemptions are no jobs: the one that runs, a few already due, and its prefill


async def jobs(engine: Engine) -> int:
    models = (await engine.load()).models.values()
    return sum(m.prefill_jobs_total + m.decode_jobs_total for m in models)


def test_the_busy_one_takes_the_pool_and_gives_way(tmp_path: Path) -> None:
    paths = {
        "busy": make_checkpoint(tmp_path / "busy", "qwen2"),  # 6 blocks for 16 tokens
        "idle": make_checkpoint(tmp_path / "idle", "qwen3"),  # 3 blocks for 10 tokens
    }
    prompts = [[(7 * i + j) % VOCAB for j in range(40)] for i in range(40)]
    wake = [list(range(i, i + 60)) for i in range(3)]

    async def play(names: list[str]) -> tuple[list[Answer], list[Answer], float, int]:
        spec = spec_of({name: paths[name] for name in names}, kv_bytes=BLOCKS * BLOCK, block_bytes=BLOCK)
        async with running(spec) as engine:
            busy = [asyncio.create_task(ask(engine, body("busy", p, max_tokens=40))) for p in prompts]
            most = 0.0
            while most <= 0.9:
                await asyncio.sleep(0)
                assert not all(task.done() for task in busy), f"never more than {most:.0%}"
                most = max(most, (await engine.load()).models["busy"].used_blocks / BLOCKS)
            before, answer = await jobs(engine), Answer()
            others = [asyncio.create_task(ask(engine, body("idle", p, max_tokens=20))) for p in wake[1:]]
            waited = -1
            async for frame in engine.start_generate(body("idle", wake[0], max_tokens=20)):
                answer.take(frame)
                if waited < 0 and any(isinstance(event, TokenEvent) for event in frame):
                    waited = await jobs(engine) - before
            load = await engine.load()
            assert load.models["busy"].preemptions_total > 0
            assert load.models["idle"].preemptions_total == 0
            return [*await asyncio.gather(*busy)], [answer, *await asyncio.gather(*others)], most, waited

    oracles = {name: Oracle(path) for name, path in paths.items()}
    for names in (["busy", "idle"], ["idle", "busy"]):  # the order in which they start is nothing
        served, woken, most, waited = asyncio.run(play(names))
        print(f"{'+'.join(names)}: {most:.1%} of the pool; first token of the other {waited} jobs after")
        assert most > 0.9
        assert waited <= FIRST_TOKEN_JOBS
        for name, given, answers, count in (("busy", prompts, served, 40), ("idle", wake, woken, 20)):
            for prompt, answer in zip(given, answers, strict=True):
                assert answer.ends[0].reason == "length"
                assert len(answer.tokens[0]) == count
                oracles[name].check_at_once(prompt, answer.tokens[0])
