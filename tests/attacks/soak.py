"""`python -m tests.attacks.soak [--minutes N]`: mixed traffic with aborts, moves, preemptions,
programs that are set, and restarts.

Each answer is compared with what a quiet fleet said, and what each process holds after the warm-up with what
it holds at the end. The exit code is 0 if all is right, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import aiohttp

from tests.attacks.fleet import Fleet, post, serving
from tests.footprint import Footprint

CLIENTS: Final = 12
GROWTH: Final = 0.03  # of a process's own memory
QUIET_SECONDS: Final = 20.0  # before each measurement; connections between processes are kept for 15 s
WARM: Final = 1 / 3  # of the time, ten minutes at most
ABORTED: Final = 0.15
CHANGE_SECONDS: Final = 4.0
RESTARTED: Final = "unit-1"  # alone, so that the other one's growth can be told
PROGRAMS: Final = ("least_loaded", "balanced", "data_parallel")


def requests() -> list[dict[str, Any]]:
    """Returns what is asked: short and long, greedy and drawn, guided, with several choices."""
    rng, asked = random.Random(19), list[dict[str, Any]]()
    for seed in range(24):
        body = {
            "model": rng.choice(["sums", "guide"]),
            "prompt": [rng.randrange(10, 90) for _ in range(rng.choice([3, 40, 200]))],
            "max_tokens": rng.choice([4, 40, 200]),
            "temperature": rng.choice([0, 0.9]),
            "seed": seed,
            "n": rng.choice([1, 1, 3]),
            "ignore_eos": True,
            "stream": True,
        }
        if seed % 6 == 0:
            body |= {"guided_regex": "[a-z ]{5,30}", "ignore_eos": False}
        asked.append(body)
    return asked


@dataclass(slots=True)
class Soak:
    """Traffic that can be paused."""

    fleet: Fleet
    asked: list[dict[str, Any]] = field(default_factory=requests)
    right: list[dict[int, str]] = field(default_factory=list)
    """What each request is answered, by choice."""
    going: asyncio.Event = field(default_factory=asyncio.Event)
    done: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    changes: int = 0

    async def answer(self, session: aiohttp.ClientSession, at: int, most: float) -> dict[int, str]:
        """Returns the text of each choice, cut short after `most` events. Raises ValueError for an error."""
        texts: dict[int, str] = {}
        events = 0
        async with session.post(f"{self.fleet.url}/v1/completions", json=self.asked[at]) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(str(event["error"])[:200])
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                events += 1
                if events >= most:
                    break
        return texts

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Asks for ever."""
        rng = random.Random(number)
        while True:
            await self.going.wait()
            at = rng.randrange(len(self.asked))
            most = rng.randrange(1, 20) if rng.random() < ABORTED else float("inf")
            try:
                said = await self.answer(session, at, most)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.wrong.append(f"request {at}: {type(error).__name__}: {error}")
                await asyncio.sleep(1)
                continue
            whole = most == float("inf")
            right = self.right[at]
            same = said == right if whole else all(right[one].startswith(said[one]) for one in said)
            if not same:
                self.wrong.append(f"request {at}: {said} instead of {right}"[:300])
            self.done += 1
            self.aborted += not whole

    async def change(self, session: aiohttp.ClientSession) -> None:
        """Sets programs, moves prefixes out of the caches, and restarts a unit, for ever."""
        for number, program in enumerate(cycle(PROGRAMS)):
            await asyncio.sleep(CHANGE_SECONDS)
            await self.going.wait()
            with suppress(aiohttp.ClientError, TimeoutError):
                await post(session, f"{self.fleet.url}/admin/program", {"name": program})
                if number % 4 == 3:
                    await post(session, f"{self.fleet.url}/admin/units/{RESTARTED}/restart", {"seconds": 2})
                self.changes += 1

    async def measured(self) -> dict[str, tuple[int, Footprint]]:
        """Returns what each process holds while nobody asks, and its id."""
        self.going.clear()
        await asyncio.sleep(QUIET_SECONDS)
        found = {name: (pid, Footprint.of(pid)) for name, pid in self.fleet.processes().items()}
        self.going.set()
        return found


async def soak(minutes: float, tell: Callable[[str], object]) -> bool:
    """Returns whether all answers were right and nothing has grown."""
    async with serving(more="rescheduling: {period: 0.2, out: 24, into: 30}\n") as fleet:
        playing = Soak(fleet)
        timeout = aiohttp.ClientTimeout(total=180)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            for at in range(len(playing.asked)):
                playing.right.append(await playing.answer(session, at, float("inf")))
            playing.going.set()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(playing.client(session, number)) for number in range(CLIENTS)]
                tasks.append(group.create_task(playing.change(session)))
                begun, warm = time.monotonic(), min(600.0, 60 * minutes * WARM)
                await asyncio.sleep(warm)
                before = await playing.measured()
                await asyncio.sleep(max(0.0, 60 * minutes - (time.monotonic() - begun)))
                after = await playing.measured()
                for task in tasks:
                    task.cancel()
    return _told(playing, before, after, tell)


def _told(
    playing: Soak,
    before: dict[str, tuple[int, Footprint]],
    after: dict[str, tuple[int, Footprint]],
    tell: Callable[[str], object],
) -> bool:
    failed = [f"lost: {name}" for name in before if name not in after]
    tell("| process | MiB | descriptors | threads | verdict |\n|---|---|---|---|---|")
    for name, (pid, now) in sorted(after.items()):
        was = before.get(name, (0, now))
        grown = "restarted" if was[0] != pid else was[1].growth(now, share=GROWTH)
        then = was[1]
        if grown not in ("", "restarted"):
            failed.append(f"{name}: {grown}")
        cells = (
            f"{then.mib:.1f} to {now.mib:.1f}",
            f"{then.descriptors} to {now.descriptors}",
            f"{then.threads} to {now.threads}",
        )
        tell(f"| {name} | {' | '.join(cells)} | {grown or 'holds'} |")
    for wrong in playing.wrong[:10]:
        tell(f"wrong: {wrong}")
    tell(f"{len(playing.wrong)} of {playing.done} answers were wrong; {playing.aborted} were cut off")
    tell(
        f"{playing.changes} programs were set or units restarted; {'; '.join(failed) or 'nothing has grown'}"
    )
    return not failed and not playing.wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    with suppress(KeyboardInterrupt):
        return 0 if asyncio.run(soak(parser.parse_args().minutes, print)) else 1
    print("interrupted: the fleet has ended, and nothing was told", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
