"""One pool, two models: `stories` takes the pool while `guide` sleeps, and gives way when it wakes.

The server needs a pool that these requests can fill: `kvloom serve examples/config.yaml`. Counts go to
stdout, and the shares as they were measured to stderr.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import urllib.request
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from openai import AsyncOpenAI

URL = os.environ.get("KVLOOM_URL", "http://127.0.0.1:8000")
SECONDS = 60.0
BLOCKS = 1024  # of a pool that these requests can fill
STORIES, STORY_TOKENS = 24, 200
ANSWERS, ANSWER_TOKENS = 6, 150
_SAMPLE = re.compile(r'^(kvloom_kv_blocks\w*){(?:model="(\w+)",)?unit="unit-0"} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Shares:
    """Parts of the pool that each holds."""

    guide: float
    stories: float
    free: float

    def __str__(self) -> str:
        return f"stories {self.stories:.0%}, guide {self.guide:.0%}, free {self.free:.0%}"


def blocks() -> dict[tuple[str, str], float]:
    """Returns what the server says of its blocks, by metric and model."""
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        text = response.read().decode()
    return {(name, model): float(value) for name, model, value in _SAMPLE.findall(text)}


def shares() -> Shares:
    now = blocks()
    total = now["kvloom_kv_blocks", ""]
    used = {model: value / total for (name, model), value in now.items() if name.endswith("_used")}
    return Shares(used["guide"], used["stories"], free=1 - sum(used.values()))


async def watch() -> AsyncGenerator[Shares, None]:
    while True:
        yield await asyncio.to_thread(shares)
        await asyncio.sleep(0.02)


async def until(true: Callable[[Shares], bool]) -> None:
    """Look at the pool until it is as described."""
    async with asyncio.timeout(SECONDS), aclosing(watch()) as seen:
        async for now in seen:
            if true(now):
                print(now, file=sys.stderr)
                return


async def ask(client: AsyncOpenAI, model: str, question: str, tokens: int) -> int:
    """The tokens that came."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    return answer.usage.completion_tokens if answer.usage else 0


async def main() -> None:
    if (there := blocks()["kvloom_kv_blocks", ""]) > BLOCKS:
        right = f"`kvloom serve examples/config.yaml` has {BLOCKS:,}"
        sys.exit(f"a pool of {there:,.0f} blocks is too large for these requests to fill; {right}")
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        async with asyncio.TaskGroup() as group:

            def start(count: int, model: str, question: str, tokens: int) -> list[asyncio.Task[int]]:
                return [group.create_task(ask(client, model, question, tokens)) for _ in range(count)]

            told = start(STORIES, "stories", "Tell me a story about a fox.", STORY_TOKENS)
            await until(lambda pool: pool.stories > 0.9 and pool.guide == 0)
            print("guide sleeps: stories holds more than 90 % of the pool")

            answered = start(ANSWERS, "guide", "What is a block?", ANSWER_TOKENS)
            await until(lambda pool: pool.guide > 0.1 and pool.stories < 0.9)
            print("guide wakes: it holds more than 10 %, stories less than 90 %")

        whole = [task.result() for task in answered].count(ANSWER_TOKENS)
        print(f"guide: {whole} of {ANSWERS} answers are whole")
        whole = [task.result() for task in told].count(STORY_TOKENS)
        print(f"stories: {whole} of {STORIES} answers are whole")
        await until(lambda pool: pool.free == 1)
        print("no request holds a block any more")


if __name__ == "__main__":
    asyncio.run(main())
