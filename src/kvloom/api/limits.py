"""Bounds on request bodies: how large, and how long they may take to come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.api.errors import BodyTooLarge, BodyTooSlow, error_response
from kvloom.types.errors import KvloomError, Unavailable

MAX_HELD = 256 << 20  # bytes of all bodies together


class LimitBody:
    """ASGI middleware. Counts the bytes that come, whatever the headers promise; `max_held` bounds those of
    all requests together."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float, max_held: int = MAX_HELD) -> None:
        self._app = app
        self._max_held = max_held
        self._held = 0
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await error_response(scope, self._too_large())(scope, receive, send)
            return
        body = _BoundedBody(receive, self._max_bytes, self._max_seconds, self._hold)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, body.receive, watched_send)
        except (BodyTooLarge, BodyTooSlow, Unavailable) as error:
            if started:
                raise
            await error_response(scope, error)(scope, receive, send)
        finally:
            self._held -= body.seen

    def _hold(self, count: int) -> None:
        self._held += count
        if self._held > self._max_held:
            raise Unavailable("too many large requests at once; send this one again", retry_after=1)

    def _too_large(self) -> KvloomError:
        return BodyTooLarge(f"the request body is larger than {self._max_bytes} bytes")


class _BoundedBody:
    """A receive that gives up on a body too large or too slow, and never on a quiet client after it."""

    def __init__(
        self, receive: Receive, max_bytes: int, max_seconds: float, hold: Callable[[int], None]
    ) -> None:
        self._receive = receive
        self._hold = hold
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self.seen = 0
        self._deadline: float | None = None
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._max_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"the request body took more than {self._max_seconds:g} s to come") from None
        size = len(message.get("body", b""))
        self.seen += size
        self._hold(size)
        if self.seen > self._max_bytes:
            raise BodyTooLarge(f"the request body is larger than {self._max_bytes} bytes")
        self._complete = not message.get("more_body", False)
        return message
