"""Keys, and what each opens."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.errors import Forbidden, error_response
from kvloom.api.wire import is_verb
from kvloom.core.errors import KvloomError, Unauthorized

OPEN_PATHS: Final = frozenset({"/health", "/docs", "/openapi.json"})
ADMIN: Final = "/admin"


@dataclass(frozen=True, slots=True)
class Keys:
    """api: for completions; none: everybody may ask for them. admin: for everything. secret: the fleet's own,
    made at its start, for everything as well."""

    api: frozenset[str] = frozenset()
    admin: frozenset[str] = frozenset()
    secret: str | None = None


class RequireKey:
    """ASGI middleware. /admin and /verbs need an admin key; where there are no keys at all, a caller on this
    machine. All else but the open paths needs a key of either kind, where there are API keys."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._api = [key.encode() for key in keys.api]
        self._admin = [key.encode() for key in keys.admin]
        self._secret = [] if keys.secret is None else [keys.secret.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._problem(scope)):
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> KvloomError | None:
        given = dict(scope["headers"]).get(b"authorization")
        known = _known(given, self._api), _known(given, self._admin), _known(given, self._secret)
        if any(known[1:]):
            return None
        if is_admin(scope):
            return self._refuse_admin(scope, given, known=known[0])
        if not self._api or known[0] or scope["path"] in OPEN_PATHS:
            return None
        return _unauthorized(given, "API key")

    def _refuse_admin(self, scope: Scope, given: bytes | None, *, known: bool) -> KvloomError | None:
        if self._admin:
            if known:
                return Forbidden(
                    "an API key was given; this path needs an admin key, one of `admin_key_file`"
                )
            return _unauthorized(given, "admin key")
        if self._api:
            return Forbidden("this path needs an admin key, and none is set; `admin_key_file` sets some")
        if _is_here(scope):
            return None
        return Forbidden(
            "this path is open to callers on the server's own machine only, as no admin key is set; "
            "`admin_key_file` sets some"
        )


def is_admin(scope: Scope) -> bool:
    path: str = scope["path"]
    return is_verb(scope) or path == ADMIN or path.startswith(ADMIN + "/")


def _known(given: bytes | None, keys: list[bytes]) -> bool:
    scheme, _, key = (given or b"").partition(b" ")
    # Every key is compared in full, so that the time tells nothing.
    matches = [hmac.compare_digest(key.strip(), one) for one in keys]
    return any(matches) and scheme.lower() == b"bearer"


def _unauthorized(given: bytes | None, what: str) -> Unauthorized:
    said = f"the {what} is wrong" if given else f"no {what} was given"
    return Unauthorized(f"{said}: send 'Authorization: Bearer KEY'")


def _is_here(scope: Scope) -> bool:
    """Whether the caller is on this machine; over a Unix socket it is."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        address = ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
