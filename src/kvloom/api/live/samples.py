"""Samples of the fleet as server-sent events: made and encoded once a second, however many listen."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.api.stream import while_connected
from kvloom.journal.samples import Sample, SampleHistory, encode_sample
from kvloom.types.clock import Clock

PERIOD: Final = 1.0  # seconds


async def _none() -> Sample:
    return Sample(at=0.0, units=(), models=())


class LiveSamples:
    """Takes samples while somebody listens, and now and then for the history while nobody does."""

    def __init__(
        self,
        take: Callable[[], Awaitable[Sample]] = _none,
        encode: Callable[[Sample], bytes] = encode_sample,
    ) -> None:
        """take: asks the fleet."""
        self.history = SampleHistory()
        self.over = False
        """Nothing more comes."""
        self.last = b""
        """The event of the last sample."""
        self._take = take
        self._encode = encode
        self._listeners: set[asyncio.Event] = set()

    async def run(self, clock: Clock) -> None:
        """Takes samples until it is cancelled."""
        last = -math.inf
        while True:
            now = clock.now()
            if self._listeners or now - last >= self.history.step:
                last = now
                await self._next()
            await clock.sleep(max(0.0, now + PERIOD - clock.now()))

    def close(self) -> None:
        """Lets those who listen end."""
        self.over = True
        self._ring()

    def join(self, news: asyncio.Event) -> None:
        """Sets the event with each sample, and at the end."""
        self._listeners.add(news)

    def leave(self, news: asyncio.Event) -> None:
        self._listeners.discard(news)

    async def _next(self) -> None:
        sample = await self._take()
        encoded = self._encode(sample)
        self.history.keep(sample.at, encoded)
        self.last = b"id: %r\nevent: sample\ndata: %b\n\n" % (sample.at, encoded)
        self._ring()

    def _ring(self) -> None:
        for news in self._listeners:
            news.set()


class SampleStream(Response):
    """The samples as server-sent events: those of the last hour as one, and then each as it is taken. A
    client that reads slowly misses some."""

    def __init__(self, samples: LiveSamples, last: str) -> None:
        """last: the id of the last sample that the client has; empty for none."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._samples = samples
        self._since = _time(last)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        news = asyncio.Event()
        self._samples.join(news)
        try:
            await while_connected(receive, self._send_all(send, news))
        except ClientDisconnect:
            return
        finally:
            self._samples.leave(news)

    async def _send_all(self, send: Send, news: asyncio.Event) -> None:
        samples = self._samples

        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write(b'event: history\ndata: {"samples":[')
        between = b""
        for encoded in samples.history.since(self._since):
            await write(between + encoded)
            between = b","
        await write(b"]}\n\n")
        while not samples.over:
            await news.wait()
            news.clear()
            if not samples.over:
                await write(samples.last)
        await write(b"", more=False)


def _time(last: str) -> float:
    """Returns the time of an id; that of nobody's id is before all."""
    try:
        at = float(last)
    except ValueError:
        return -math.inf
    return at if math.isfinite(at) else -math.inf
