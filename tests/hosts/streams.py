"""Clients of a fleet: many streams at the same time, each of which must be what a lone engine makes of it.

A stream whose connection ends before its end is resumed by the id of its last event, at any gateway, as
docs/serving.md tells clients to. So no death of a process is an excuse: what a client misses, gets twice or
gets wrong counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

PATH: Final = "/v1/completions"
PATIENCE: Final = 240.0  # seconds without an event, after which a stream is lost
QUIET: Final = (
    60.0  # Seconds without a byte, after which a client asks again. A resumed stream catches up first.
)
TO_CONNECT: Final = 3.0
PAUSE: Final = 0.3  # between two attempts of one stream
UNITS: Final = "a fox", "an owl", "a robot", "a dragon", "a princess", "a cat", "the moon", "a boat"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    body: bytes
    choices: int


@dataclass(slots=True)
class Answer:
    """What a client has of one stream."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    """Of the output, as the stream's usage says."""
    last: str = ""
    """The id of the last event."""
    over: bool = False
    problem: str = ""
    """Why it was given up."""
    resumed: int = 0
    refused: int = 0
    """Times that a gateway or the fleet could not take it, and the client came again."""

    def take(self, data: str) -> None:
        """Takes in an event. Raises ConnectionError if it says that the stream can be resumed."""
        if data == "[DONE]":
            self.over = True
            return
        event: dict[str, Any] = json.loads(data)
        if error := event.get("error"):
            if error["code"] == "unavailable":
                raise ConnectionResetError(error["message"])
            self.problem = f"{error['code']}: {error['message']}"
            return
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                if index in self.ends:
                    self.problem = f"choice {index} ends twice"
                self.ends[index] = choice["finish_reason"]
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]


@dataclass(slots=True)
class Tally:
    """What became of streams."""

    streams: int = 0
    tokens: int = 0
    resumed: int = 0
    refused: int = 0
    quiet: float = 0.0
    """The longest time for which a client had to wait for its next event, in seconds."""
    bad: Counter[str] = field(default_factory=Counter)
    """How many were wrong, lost or doubled."""
    told: list[str] = field(default_factory=list)
    """A line for each of those."""

    def count(self, asked: Asked, answer: Answer, right: Answer) -> None:
        self.streams += 1
        self.tokens += answer.tokens
        self.resumed += answer.resumed
        self.refused += answer.refused
        if kind := _fault(answer, right):
            self.bad[kind] += 1
            self.told.append(
                f"{kind}: {asked.body.decode()} after {answer.resumed} resumptions, {answer.refused} "
                f"refusals: {answer.problem or (answer.texts, answer.ends, answer.tokens)}, "
                f"and {(right.texts, right.ends, right.tokens)} is right"
            )


def _fault(answer: Answer, right: Answer) -> str:
    """Returns what is wrong with an answer; nothing if all is well."""
    if answer.problem or not answer.over:
        return "lost"
    for index, text in right.texts.items():
        told = answer.texts.get(index, "")
        if told != text:
            if len(told) > len(text):
                return "doubled"
            return "lost" if text.startswith(told) else "wrong"
    return "" if (answer.ends, answer.tokens) == (right.ends, right.tokens) else "wrong"


def drawn(models: Sequence[str], count: int, seed: int, longest: int = 300) -> list[Asked]:
    """Returns so many requests, greedy and sampled, of one choice and of several."""
    draw, made = random.Random(seed), []
    for i in range(count):
        model = models[i % len(models)]
        sum_of = f"What is {draw.randrange(100)} + {draw.randrange(100)}?"
        choices = draw.choice((1, 1, 1, 2))
        body = {
            "model": model,
            "prompt": sum_of if model == "sums" else f"Tell me a story about {draw.choice(UNITS)}.",
            "max_tokens": draw.randint(longest // 3, longest),
            "temperature": draw.choice((0, 0.8, 1.0)),
            "seed": draw.randrange(2**31),
            "n": choices,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_event_ids": True, "include_usage": True},
        }
        made.append(Asked(json.dumps(body).encode(), choices))
    return made


class Clients:
    """Ask a fleet, and compare what they get with what is right."""

    def __init__(self, urls: Sequence[str], right: dict[Asked, Answer], seed: int = 0) -> None:
        """urls: of the fleet's gateways; right: the requests, with a lone engine's answers."""
        self.tally = Tally()
        self.events: Counter[str] = Counter()
        """How many have come, by gateway."""
        self._under_way: dict[int, str] = {}
        """The gateways of the streams that have begun and not ended."""
        self._urls = urls
        self._right = right
        self._draw = random.Random(seed)
        self._ending = False

    def stop(self) -> None:
        """Lets the streams that are under way come to their ends, and none begin."""
        self._ending = True

    async def once(self) -> None:
        """Asks everything once, at the same time."""
        async with _session() as session, asyncio.TaskGroup() as tasks:
            for asked in self._right:
                tasks.create_task(self._ask(session, asked))

    async def again_and_again(self, at_once: int) -> None:
        """Asks with so many streams at the same time, until `stop`."""

        async def keep_asking() -> None:
            while not self._ending:
                await self._ask(session, self._draw.choice(list(self._right)))

        async with _session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(keep_asking())

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        answer = await ask(session, asked, self._urls, self._draw, self._hear)
        self.tally.count(asked, answer, self._right[asked])

    def under_way(self, url: str) -> int:
        """Returns how many streams of this gateway have begun and not ended."""
        return list(self._under_way.values()).count(url)

    def _hear(self, url: str, quiet: float, answer: Answer) -> None:
        self.events[url] += 1
        self.tally.quiet = max(self.tally.quiet, quiet)
        if answer.over:
            self._under_way.pop(id(answer), None)
        else:
            self._under_way[id(answer)] = url


async def ask(
    session: aiohttp.ClientSession,
    asked: Asked,
    urls: Sequence[str],
    draw: random.Random,
    hear: Callable[[str, float, Answer], None] = lambda *_: None,
) -> Answer:
    """Returns what a client gets that resumes its stream whenever that breaks, at any of the gateways. hear:
    called at each event with its gateway, the seconds since the one before, and what the client has."""
    answer, since = Answer(), time.monotonic()
    while not answer.over and not answer.problem:
        before, url = answer.last, draw.choice(urls)
        try:
            async for event, data in _events(session, url, asked, answer):
                answer.take(data)
                answer.last = event or answer.last
                before_it, since = since, time.monotonic()
                hear(url, since - before_it, answer)
            if answer.over or answer.problem:
                break
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if time.monotonic() - since > PATIENCE:
                answer.problem = f"nothing came for {PATIENCE:g} s; at last {type(error).__name__}: {error}"
                break
        if answer.last == before:
            answer.refused += 1
        else:
            answer.resumed += 1
        await asyncio.sleep(PAUSE * draw.uniform(0.5, 1.5))
    return answer


async def _events(
    session: aiohttp.ClientSession, url: str, asked: Asked, answer: Answer
) -> AsyncIterator[tuple[str, str]]:
    """Yields the id and the data of each whole event after the last one that the client has."""
    headers = {"content-type": "application/json"} | ({"last-event-id": answer.last} if answer.last else {})
    async with session.post(url + PATH, data=asked.body, headers=headers) as response:
        if response.status != 200:
            said = await response.text()
            if response.status not in (429, 503):
                answer.problem = f"status {response.status}: {said}"
                return
            raise ConnectionRefusedError(said)
        event = data = ""
        async for line in response.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event = value
            elif name == "data":
                data = value
            elif data:
                yield event, data
                event = data = ""


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TO_CONNECT, sock_read=QUIET)
    return aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=1 << 20
    )


async def right_answers(url: str, asked: Sequence[Asked], at_once: int = 32) -> dict[Asked, Answer]:
    """Returns what the engine behind `url` makes of each request, without any fault."""
    limit, draw = asyncio.Semaphore(at_once), random.Random(0)

    async def one(request: Asked) -> Answer:
        async with limit:
            answer = await ask(session, request, [url], draw)
            assert answer.over, answer
            return answer

    async with _session() as session, asyncio.TaskGroup() as tasks:
        asking = {request: tasks.create_task(one(request)) for request in asked}
    return {request: task.result() for request, task in asking.items()}


@contextmanager
def under_way(clients: Clients, play: Callable[[], Any]) -> Iterator[Tally]:
    """Lets clients ask on a thread of their own. When the block ends, no stream begins any more, and what
    became of all is in the tally once they have ended. play: what they do, as `clients.once`."""
    thread = threading.Thread(target=lambda: asyncio.run(play()), daemon=True)
    thread.start()
    try:
        yield clients.tally
    finally:
        clients.stop()
        thread.join(2 * PATIENCE)
    assert not thread.is_alive(), "streams have not ended"
