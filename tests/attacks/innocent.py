"""`python -m tests.attacks.innocent URL MODEL [AUTHORIZATION]`: an innocent client that warms up, prints a
line, asks until its standard input ends, and then prints what it has seen."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp

WARM_SECONDS: Final = 2.0
INNOCENT_ADDRESS: Final = "127.0.0.2"
"""Attackers come from 127.0.0.1: without keys, it is addresses that are served in turn."""


@dataclass(slots=True)
class Innocent:
    """A client of one model, at another address than the attackers, that asks one short question after the
    other, each as a stream."""

    url: str
    model: str
    headers: dict[str, str]
    """Those that bring its key, if the fleet has keys."""
    seconds: list[float] = field(default_factory=list)
    """How long each answer took."""
    gap: float = 0.0
    """The longest time between two pieces of one answer."""
    wrong: list[str] = field(default_factory=list)
    """Answers that were refused, cut short, or another text than the first one."""

    async def ask_for_ever(self) -> None:
        first: str | None = None
        connector = aiohttp.TCPConnector(local_addr=(INNOCENT_ADDRESS, 0))
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                begun = time.monotonic()
                try:
                    text = await self._ask(session)
                except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
                    self.wrong.append(f"{type(error).__name__}: {error}"[:200])
                    await asyncio.sleep(0.1)
                    continue
                self.seconds.append(time.monotonic() - begun)
                first = first or text
                if text != first:
                    self.wrong.append(text[:200])
                await asyncio.sleep(0.05)

    async def _ask(self, session: aiohttp.ClientSession) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "temperature": 0,
            "max_tokens": 12,
            "stream": True,
        }
        pieces: list[bytes] = []
        async with session.post(
            f"{self.url}/v1/chat/completions", json=body, headers=self.headers
        ) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {await response.text()}")
            last = None
            async for data in response.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    self.gap = max(self.gap, now - last)
                last = now
                pieces.append(data)
        stream = b"".join(pieces)
        if b"data: [DONE]" not in stream:
            raise ValueError(f"cut short: {stream[-200:]!r}")
        return "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', stream.decode()))


async def main(url: str, model: str, authorization: str = "") -> None:
    """Prints the answers' seconds, the longest gap and the wrong answers as JSON."""
    client = Innocent(url, model, {"authorization": authorization} if authorization else {})
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(client.ask_for_ever())
        await asyncio.sleep(WARM_SECONDS)
        client.seconds.clear()  # what is loaded with the first answers is no measure
        print("warm", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        asking.cancel()
    print(json.dumps([client.seconds, client.gap, client.wrong]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
