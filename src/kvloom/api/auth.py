"""The keys of a gateway, and which paths each opens."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.access.origins import refuse_page
from kvloom.api.access.proxies import PROXIED
from kvloom.api.errors import CertificateRequired, Forbidden, error_response, is_verb
from kvloom.api.routes import PUBLIC, Caller
from kvloom.types.errors import KvloomError, Unauthorized

OPEN_PATHS: Final = frozenset(row.path for row in PUBLIC if row.caller is Caller.ANYONE)
ADMIN_PATH: Final = "/admin"
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]*)?")
_PRIORITY: Final = "kvloom.priority"
_OWN_PAGE: Final = frozenset({"same-origin", "none"})  # "none": a person has typed the address


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a gateway knows."""

    api: Mapping[str, int | None] = field(default_factory=dict)
    """Keys for completions, each with the most urgent priority that it gives a request, or None for any.
    Everybody may ask for completions if there is no such key."""
    admin: frozenset[str] = frozenset()
    """Keys for everything."""
    secret: str | None = None
    """The fleet's own key, made at its start, which is for everything as well."""


class RequireKey:
    """An ASGI middleware that refuses callers without the key that a path needs.

    /admin and /verbs need an admin key. If there are no keys at all, they need a caller on this machine that
    is not a page of another site in a browser. If there are API keys, every other path needs a key of either
    kind, except those that the table of routes opens to anyone.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, *, origins: Collection[str] = (), certified: bool = False
    ) -> None:
        """origins: those whose pages may ask without a key; certified: an admin needs a certificate."""
        self._app = app
        self._origins = frozenset(origins)
        self._certified = certified
        self._api = [key.encode() for key in keys.api]
        self._priorities = {key.encode(): one for key, one in keys.api.items() if one is not None}
        self._admin = [key.encode() for key in keys.admin]
        self._secret = [] if keys.secret is None else [keys.secret.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._problem(scope)):
            await error_response(scope, error)(scope, receive, send)
            return
        if scope["type"] == "http" and (most := self._priority(scope)) is not None:
            scope.setdefault("state", {})[_PRIORITY] = most
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> KvloomError | None:
        given = dict(scope["headers"]).get(b"authorization")
        known = _known(given, self._api), _known(given, self._admin), _known(given, self._secret)
        by_certificate = self._certified and is_admin(scope) and not known[2]
        if by_certificate and ((error := _uncertified(scope)) or not self._admin):
            return error
        if any(known[1:]):
            return None
        if is_admin(scope):
            return self._refuse_admin(scope, given, known=known[0])
        if known[0] or scope["path"] in OPEN_PATHS:
            return None
        if not self._api:
            return refuse_page(scope, self._origins)
        return _unauthorized(given, "API key")

    def _priority(self, scope: Scope) -> int | None:
        """Returns the most urgent priority that the caller's key gives."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        return self._priorities.get(given.partition(b" ")[2].strip())

    def _refuse_admin(self, scope: Scope, given: bytes | None, *, known: bool) -> KvloomError | None:
        if self._admin:
            if known:
                return Forbidden(
                    "an API key was given; this path needs an admin key, one of `admin_key_file`"
                )
            return _unauthorized(given, "admin key")
        if self._api:
            return Forbidden("this path needs an admin key, and none is set; `admin_key_file` sets some")
        if (wrong := _stranger(scope)) is None:
            return None
        return Forbidden(f"{wrong}, as no admin key is set; `admin_key_file` sets some")


def priority(scope: Scope, asked: int | None) -> int:
    """Returns the priority of a request that asks for `asked`, if for any: at most what its key gives."""
    most: int | None = scope.get("state", {}).get(_PRIORITY)
    if most is None:
        return asked or 0
    return most if asked is None else max(asked, most)


def is_admin(scope: Scope) -> bool:
    path: str = scope["path"]
    return is_verb(scope) or path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/")


def _known(given: bytes | None, keys: list[bytes]) -> bool:
    scheme, _, key = (given or b"").partition(b" ")
    # Every key is compared in full, so that the time that it takes tells nothing.
    matches = [hmac.compare_digest(key.strip(), one) for one in keys]
    return any(matches) and scheme.lower() == b"bearer"


def _unauthorized(given: bytes | None, what: str) -> Unauthorized:
    said = f"the {what} is wrong" if given else f"no {what} was given"
    return Unauthorized(f"{said}: send 'Authorization: Bearer KEY'")


def _stranger(scope: Scope) -> str | None:
    """Returns why the caller is not trusted without a key, or None if it is. A Unix socket's caller is local.

    A browser on this machine speaks for the pages that it shows. A page whose name was made to lead here
    sends that name as Host. A page of another site or port sends its own Origin, except with what only
    reads, like an image or a link; for these, the browser itself says in Sec-Fetch-Site where they come from
    (Fetch Metadata, section 2.3).
    """
    hosts = _values(scope, b"host")
    client = scope.get("client")
    if scope.get(PROXIED):
        return "this path is open to callers on the server's own machine only, and not to a proxy's"
    if client is not None:
        if not _is_loopback(client[0]):
            return "this path is open to callers on the server's own machine only"
        if len(hosts) != 1 or not _is_local(hosts[0]):
            return "this path is open where the Host header is a loopback address or `localhost` only"
    return _foreign(scope)


def _foreign(scope: Scope) -> str | None:
    """Returns why the caller may be a page of another site, or None if it is not."""
    hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
    if any(origin.rpartition("://")[2] not in hosts for origin in origins):
        return "this path is open where the Origin header, if there is one, is the server's own only"
    if not _OWN_PAGE.issuperset(_values(scope, b"sec-fetch-site")):
        return "this path is open to no page of another site, as the Sec-Fetch-Site header says this is"
    return None


def _uncertified(scope: Scope) -> KvloomError | None:
    """Returns why the certificate that a connection has shown does not open this path, or None if it does. A
    proxy's is not that of whoever it speaks for, and a browser shows one for every page."""
    if not scope.get("extensions", {}).get("tls", {}).get("client_cert_name") or scope.get(PROXIED):
        return CertificateRequired(
            "this path needs a client certificate that an authority of `client_ca` signed"
        )
    return Forbidden(wrong) if (wrong := _foreign(scope)) else None


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for header, value in scope["headers"] if header == name]


def _is_local(host: str) -> bool:
    """Returns whether the host is localhost or a loopback address, with a port or without."""
    parts = _HOST.fullmatch(host)
    return parts is not None and (
        parts["name"] == "localhost" or _is_loopback(parts["ipv6"] or parts["name"])
    )


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
