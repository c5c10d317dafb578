"""API keys: every route but the open ones needs one, where there are any."""

from __future__ import annotations

import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.errors import error_response
from kvloom.core.errors import Unauthorized

OPEN_PATHS: Final = frozenset({"/health", "/docs", "/openapi.json"})


class RequireKey:
    """ASGI middleware. No keys: everything is open."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization")
            if not self._known(given):
                said = "the API key is wrong" if given else "no API key was given"
                error = Unauthorized(f"{said}: send 'Authorization: Bearer KEY'")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, given: bytes | None) -> bool:
        scheme, _, key = (given or b"").partition(b" ")
        # Every key is compared in full, so that the time tells nothing.
        matches = [hmac.compare_digest(key.strip(), one) for one in self._keys]
        return any(matches) and scheme.lower() == b"bearer"
