"""Streams outlive kill -9 of the engines they come from: real processes, real models, the openai client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from kvloom.config.config import DEMO
from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE, Fleet
from tests.serve.streaming import serving

CONFIG = f"""
kv_memory: 64MiB
block_bytes: 4KiB
models: {{{{guide: {DEMO}/guide, stories: {DEMO}/stories, shared: {{shared}}, lone: {{lone}}}}}}
units:
  - models: [stories, shared]
  - models: [stories, guide, shared, lone]
"""
JSON = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 120}}, "required": ["a"]}
ASKED: tuple[dict[str, Any], ...] = (
    {"model": "stories", "prompt": "Once upon a time", "n": 2, "temperature": 0.8},
    {"model": "stories", "prompt": "The little dog", "temperature": 0.0, "frequency_penalty": 0.5},
    {"model": "stories", "prompt": "One day", "temperature": 0.7, "logprobs": 1},
    {"model": "stories", "prompt": "Tell:", "extra_body": {"guided_json": JSON}, "temperature": 0.9},
    {"model": "guide", "prompt": "What is a block?", "temperature": 0.9, "max_tokens": 900},
)
LONG, SOON = 200, 12  # tokens of most answers; after so many chunks of all, an engine dies
FAR, MOST = 600, 30_000  # chunks that are read of an endless stream; its tokens, which take half a minute
ENDLESS: tuple[dict[str, Any], ...] = tuple(
    {"model": model, "prompt": [1, 2, 3], "temperature": 0.9, "max_tokens": MOST}
    for model in ("shared", "shared", "lone")  # one at each engine, and one at the only engine of its model
)


class Meeting:
    """All streams are under way; then an engine dies."""

    def __init__(self, kill: Callable[[], object]) -> None:
        self._kill = kill
        self._missing = len(ASKED) + len(ENDLESS)
        self.over = asyncio.Event()

    async def come(self) -> None:
        """Waits for all others."""
        self._missing -= 1
        if not self._missing:
            await asyncio.to_thread(self._kill)
            self.over.set()
        await self.over.wait()


async def _said(client: openai.AsyncOpenAI, asked: dict[str, Any], meeting: Meeting) -> dict[int, Any]:
    """By choice: its text, and why it ended; of an endless one its beginning."""
    extra = {"ignore_eos": True} | asked.get("extra_body", {})
    stream = await client.completions.create(
        **{"max_tokens": LONG} | asked | {"extra_body": extra}, seed=11, stream=True
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    count = 0
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                assert choice.index not in reasons
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            count += 1
            if count == SOON:
                await meeting.come()
            if count == FAR and asked in ENDLESS:
                break
    return {choice: (text, reasons.get(choice)) for choice, text in texts.items()}


def _same(asked: dict[str, Any], one: dict[int, Any], other: dict[int, Any]) -> bool:
    """Returns whether two answers are the same; of endless ones the beginnings, as far as both were read."""
    if asked not in ENDLESS:
        return one == other
    short, long = sorted((one[0][0], other[0][0]), key=len)
    return bool(long.startswith(short))


async def _all(url: str, kill: Callable[[], object] = lambda: None) -> list[dict[int, Any]]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE
    ) as client:
        meeting = Meeting(kill)
        return await asyncio.gather(*(_said(client, asked, meeting) for asked in (*ASKED, *ENDLESS)))


def test_every_stream_is_the_same_whichever_engine_dies(tmp_path: Path) -> None:
    """Some have another engine to go on at, `lone` waits until its only one is back."""
    paths = {
        name: make_checkpoint(tmp_path / name, "llama", max_position_embeddings=2 * MOST)
        for name in ("shared", "lone")
    }
    with serving(tmp_path, CONFIG.format(**paths)) as (running, url):
        whole = asyncio.run(_all(url))
        for unit, words in (("unit-0", "goes elsewhere"), ("unit-1", "waits for a restart")):

            def kill(unit: str = unit, words: str = words) -> None:
                os.kill(running.children()[unit], signal.SIGKILL)
                _heard(running, f"{unit} | was killed by SIGKILL", words)

            found = asyncio.run(_all(url, kill))
            assert all(map(_same, (*ASKED, *ENDLESS), found, whole))
            _heard(running, f"{unit} | answers again")


def _heard(running: Fleet, *said: str) -> None:
    """Waits until the fleet has said so, in whatever order."""
    for words in said:
        if words not in running.output:
            running.wait_for(words)
