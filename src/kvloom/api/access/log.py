"""The id of each request, which the caller may give, and a line for each that has ended."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.api.access.audit import FLEET
from kvloom.api.access.tenants import access_of
from kvloom.api.errors import ID_STATE, REQUEST_ID, is_messages
from kvloom.api.metrics import Watch

_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_WATCH: Final = "kvloom.watch"
MOST_PATH: Final = 200


def measured_by(scope: Scope, watch: Watch) -> None:
    """Notes what measures the request."""
    scope.setdefault("state", {})[_WATCH] = watch


class LogRequests:
    """An ASGI middleware that gives each request an id, and each answer the request's. An id that the caller
    gives is taken if it is 1 to 128 printable characters of ASCII without spaces."""

    def __init__(self, app: ASGIApp, write: Callable[[str], object] | None = None) -> None:
        """write: takes a line of JSON for each request that is not the fleet's own, as its scheduler's are;
        None if there are to be none."""
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == REQUEST_ID.encode()]
        known = len(given) == 1 and _ID.fullmatch(given[0]) is not None
        name = given[0].decode() if known else secrets.token_hex(12)
        scope.setdefault("state", {})[ID_STATE] = name
        begun, status = monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = name
                if is_messages(scope):
                    headers["request-id"] = name  # Anthropic's name of it
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            if self._write is not None and not _is_fleets(scope):
                self._write(msgspec.json.encode(_line(scope, name, status, monotonic() - begun)).decode())


def _is_fleets(scope: Scope) -> bool:
    """Returns whether the caller has the fleet's own secret; a key with a name may be called as it is."""
    access = access_of(scope)
    return access.admin == FLEET and access.holder is None


def _line(scope: Scope, name: str, status: int, seconds: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": name,
        "method": scope["method"],
        "path": scope["path"][:MOST_PATH],
        "status": status,
    }
    watch: Watch | None = scope["state"].get(_WATCH)
    if watch is not None:
        prompt, output = watch.tokens
        line |= {"model": watch.model, "prompt_tokens": prompt, "output_tokens": output}
        line |= {"status": watch.status or status}
        if watch.request:
            line["request"] = watch.request
        if watch.first_seconds is not None:
            line["ttft"] = round(watch.first_seconds, 4)
    return line | {"seconds": round(seconds, 4)}
