"""Streams outlive kill -9 of the engines they come from: real processes, real models, the openai client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import openai

from kvloom.config.config import DEMO
from tests.processes import Fleet
from tests.serve.streaming import serving

CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
models: {{guide: {DEMO}/guide, stories: {DEMO}/stories}}
units:
  - models: [stories]
  - models: [stories, guide]
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


async def _said(client: openai.AsyncOpenAI, asked: dict[str, Any], soon: asyncio.Event) -> dict[int, Any]:
    """By choice: its text, and why it ended. soon: set once it is well under way."""
    extra = {"ignore_eos": True} | asked.get("extra_body", {})
    stream = await client.completions.create(
        **{"max_tokens": LONG} | asked | {"extra_body": extra}, seed=11, stream=True
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    count = 0
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        count += 1
        if count == SOON:
            soon.set()
    soon.set()
    return {choice: (text, reasons[choice]) for choice, text in texts.items()}


async def _all(url: str, under_way: Awaitable[None] | None = None) -> list[dict[int, Any]]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        begun = [asyncio.Event() for _ in ASKED]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_said(client, asked, soon))
                for asked, soon in zip(ASKED, begun, strict=True)
            ]
            for soon in begun:
                await soon.wait()
            assert not all(task.done() for task in tasks)
            if under_way is not None:
                await under_way
        return [task.result() for task in tasks]


async def _kill(running: Fleet, unit: str) -> None:
    os.kill(running.children()[unit], signal.SIGKILL)


def test_every_stream_is_the_same_whichever_engine_dies(tmp_path: Path) -> None:
    """Some have another engine to go on at, `guide` waits until its only one is back."""
    with serving(tmp_path, CONFIG) as (running, url):
        whole = asyncio.run(_all(url))
        for unit in ("unit-0", "unit-1"):
            found = asyncio.run(_all(url, _kill(running, unit)))
            assert found == whole
            running.wait_for(f"{unit} | was killed by SIGKILL")
            running.wait_for(f"{unit} | answers again")
    assert "goes elsewhere" in running.output
    assert "waits for a restart" in running.output
