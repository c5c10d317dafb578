"""The keys of a gateway, and which paths each opens."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.access.audit import FLEET
from kvloom.api.access.keyring import KeyRing
from kvloom.api.access.origins import foreign_page, header_words, host_name, refuse_page
from kvloom.api.access.proxies import PROXIED, is_loopback, network_of
from kvloom.api.access.tenants import Access, access_of, set_access
from kvloom.api.errors import CertificateRequired, Forbidden, error_response, is_verb
from kvloom.api.routes import LOAD_LORA, PAGE, PUBLIC, UNLOAD_LORA, Caller
from kvloom.page import PAGE_PATH
from kvloom.types.errors import KvloomError, Unauthorized

OPEN_PATHS: Final = frozenset(row.path for row in (*PUBLIC, *PAGE) if row.caller is Caller.ANYONE)
ADMIN_PATH: Final = "/admin"
_ORDERS: Final = (LOAD_LORA, UNLOAD_LORA)
METRICS_PATH: Final = "/metrics"
_ADMIN_FILE: Final = "a key of admin_key_file"
_SETS_ADMINS: Final = "`admin_key_file`, or a key with `admin: true` in the file `keys`, sets one"


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
    ring: KeyRing | None = None
    """Keys with names. If there is a ring, completions need a key, even if the ring is empty."""
    share: Literal["auto", "all", "key"] = "auto"
    """Whether a key shares prefixes with all keys, or with itself alone; `auto` lets keys without names
    share."""


class RequireKey:
    """An ASGI middleware that refuses callers without the key that a path needs.

    /admin and /verbs need an admin key. If there are no keys at all, they need a caller on this machine that
    is not a page of another site in a browser. If there are API keys, every other path needs a key of either
    kind, except those that the table of routes opens to anyone. /metrics, which tells of all keys, is closed
    to keys with names that are no admin's.
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
        self._ring = keys.ring
        self._share = keys.share
        self._signs = (keys.secret or secrets.token_urlsafe()).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization")
            if given is None and (key := headers.get(b"x-api-key")) is not None:  # as Anthropic's clients do
                given = b"Bearer " + key
            access = self._identify(scope, given)
            if error := self._problem(scope, given, access):
                await error_response(scope, error)(scope, receive, send)
                return
            set_access(scope, access)
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope, given: bytes | None) -> Access:
        """Returns who calls, also if that is not let in."""
        scheme, _, text = (given or b"").partition(b" ")
        key = text.strip() if scheme.lower() == b"bearer" else b""
        named = None if self._ring is None else self._ring.find(key)
        if named is not None:
            name, shares = named.key.name, self._share == "all"
            return Access(
                tenant=name,
                known=True,
                salt="" if shares else name,
                shows_cached=not shares,
                priority=named.key.priority,
                admin=name if named.key.admin else None,
                holder=named,
            )
        own, fleets, api = (_is_one(key, keys) for keys in (self._admin, self._secret, self._api))
        if not (own or fleets or api):
            return Access(tenant=network_of(client[0]) if (client := scope.get("client")) else "")
        # of a key that may be short, and would be found by its plain digest
        sign = "#" + hmac.new(self._signs, key, "sha256").hexdigest()[:16]
        return Access(
            tenant=sign,
            known=True,
            salt=sign if self._share == "key" else "",
            priority=self._priorities.get(key),
            admin=_ADMIN_FILE if own else FLEET if fleets else None,
        )

    def _problem(self, scope: Scope, given: bytes | None, access: Access) -> KvloomError | None:
        path, holder = scope["path"], access.holder
        if holder is not None and self._ring is not None and self._ring.check_expiry(holder):
            return None if is_open(path) else Unauthorized(f"the key of {access.tenant} has expired")
        if is_admin(scope):
            return self._admin_problem(scope, given, access)
        if holder is not None and access.admin is None and path == METRICS_PATH:
            return Forbidden(f"{path} tells of all keys: it needs an admin key, or one of `api_key_file`")
        if access.known or is_open(path):
            return None
        if not self._locked:
            return refuse_page(scope, self._origins)
        return _unauthorized(given, "API key")

    @property
    def _locked(self) -> bool:
        """Returns whether completions need a key."""
        return bool(self._api) or self._ring is not None

    @property
    def _has_admin_keys(self) -> bool:
        return bool(self._admin) or (self._ring is not None and self._ring.has_admin)

    def _admin_problem(self, scope: Scope, given: bytes | None, access: Access) -> KvloomError | None:
        by_certificate = self._certified and access.admin != FLEET
        keyless = not self._admin and self._ring is None  # whatever a file of keys says just now
        if by_certificate and ((error := _uncertified(scope)) or keyless):
            return error
        return None if access.admin is not None else self._refuse_admin(scope, given, known=access.known)

    def _refuse_admin(self, scope: Scope, given: bytes | None, *, known: bool) -> KvloomError | None:
        if self._has_admin_keys:
            if known:
                return Forbidden(
                    "an API key was given; this path needs an admin key, one of `admin_key_file` "
                    "or a key with `admin: true`"
                )
            return _unauthorized(given, "admin key")
        if self._locked:
            return Forbidden(f"this path needs an admin key, and none is set; {_SETS_ADMINS}")
        if (wrong := _stranger(scope)) is None:
            return None
        return Forbidden(f"{wrong}, as no admin key is set; {_SETS_ADMINS}")


def priority(scope: Scope, asked: int | None) -> int:
    """Returns the priority of a request that asks for `asked`, if for any: at most what its key gives."""
    most = access_of(scope).priority
    if most is None:
        return asked or 0
    return most if asked is None else max(asked, most)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_PATH)


def is_admin(scope: Scope) -> bool:
    path: str = scope["path"]
    return is_verb(scope) or path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/") or path in _ORDERS


def _is_one(key: bytes, keys: list[bytes]) -> bool:
    # Every key is compared in full, so that the time that it takes tells nothing.
    matches = [hmac.compare_digest(key, one) for one in keys]
    return key != b"" and any(matches)


def _unauthorized(given: bytes | None, what: str) -> Unauthorized:
    said = f"the {what} is wrong" if given else f"no {what} was given"
    return Unauthorized(f"{said}: send 'Authorization: Bearer KEY'")


def _stranger(scope: Scope) -> str | None:
    """Returns why the caller is not trusted without a key, or None if it is. A Unix socket's caller is local.

    A browser on this machine speaks for the pages that it shows. A page whose name was made to lead here
    sends that name as Host.
    """
    hosts = header_words(scope, b"host")
    client = scope.get("client")
    if scope.get(PROXIED):
        return "this path is open to callers on the server's own machine only, and not to a proxy's"
    if client is not None:
        if not is_loopback(client[0]):
            return "this path is open to callers on the server's own machine only"
        name = host_name(hosts[0]) if len(hosts) == 1 else ""
        if name != "localhost" and not is_loopback(name):
            return "this path is open where the Host header is a loopback address or `localhost` only"
    return _foreign(scope)


def _foreign(scope: Scope) -> str | None:
    who = foreign_page(scope)
    return who and f"this path is not open to {who}"


def _uncertified(scope: Scope) -> KvloomError | None:
    """Returns why the certificate that a connection has shown does not open this path, or None if it does. A
    proxy's is not that of whoever it speaks for, and a browser shows one for every page."""
    if not scope.get("extensions", {}).get("tls", {}).get("client_cert_name") or scope.get(PROXIED):
        return CertificateRequired(
            "this path needs a client certificate that an authority of `client_ca` signed"
        )
    return Forbidden(wrong) if (wrong := _foreign(scope)) else None
