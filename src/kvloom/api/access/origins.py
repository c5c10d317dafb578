"""Pages in browsers: which may ask without a key, and what browsers must be told so that pages of other
origins may."""

from __future__ import annotations

import re
from collections.abc import Collection
from socket import gethostname
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.access.proxies import header_lines, read_address
from kvloom.api.errors import ForeignPage, UnsupportedMedia, error_response
from kvloom.types.errors import KvloomError

_ANY: Final = "*"
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)(?:%[^\]]*)?\]|(?P<name>[^:\[\]]+))(?::[0-9]*)?")
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that nobody can own in the public DNS (RFC 6761, 6762 and 8375, and ICANN's resolution
2024.07.29.06)."""
_JSON: Final = re.compile(r"application/(?:(?:[a-z0-9.+-]+\+)?json|x-www-form-urlencoded)")
"""The types of bodies that count as JSON, with the one that curl gives to every body. A page could give it
too, but its browser tells the origin."""
_API_PATHS: Final = ("/v1/", "/api/", "/tokenize", "/detokenize")
_OWN_PAGE: Final = frozenset({"same-origin", "none"})
"""The values of Sec-Fetch-Site for a page of the server's own, and for an address that a person has typed."""
_READS: Final = frozenset({"GET", "HEAD"})


def cors(origins: Collection[str]) -> Middleware:
    """Returns the middleware that lets pages of these origins read answers (the CORS protocol of Fetch,
    section 3.3): it answers preflights, which come without a key, and adds headers to answers for pages."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
        max_age=600,
    )


def refuse_page(scope: Scope, allowed: Collection[str]) -> KvloomError | None:
    """Returns why a request without a key is refused: a page that a browser shows may have sent it, and is
    neither the server's own nor of an allowed origin. None if it may go on.

    Only browsers send Origin and Sec-Fetch-Site, and no page can leave out or change what its browser
    sends of these, so clients without them may use any name for this server. A page whose name was made to
    lead here (DNS rebinding) calls itself the server's own, so a name counts only if it cannot be anybody's.
    """
    hosts, origins = header_words(scope, b"host"), header_words(scope, b"origin")
    if not origins and scope["method"] in _READS:  # Browsers leave it out here; it tells the page nothing.
        return None
    if origins and (_ANY in allowed or all(origin in allowed for origin in origins)):
        return None
    who = foreign_page(scope)
    if who is None and origins and (len(hosts) != 1 or not _is_own(hosts[0], allowed)):
        who = f"a page that calls this server {hosts[0][:80]}"
    if who is None:
        return None
    right = "`allow_origins` in the server's config lets pages of other sites ask"
    return ForeignPage(f"{who} asks without an API key; {right}")


def foreign_page(scope: Scope) -> str | None:
    """Returns which page of another site a browser may be speaking for, or None for no such page.

    A page of another site or port sends its own Origin, except with what only reads, like an image or a
    link; for these, the browser itself says in Sec-Fetch-Site where they come from (Fetch Metadata, section
    2.3).
    """
    hosts, origins = header_words(scope, b"host"), header_words(scope, b"origin")
    if any(origin.rpartition("://")[2] not in hosts for origin in origins):
        return f"a page of {origins[0][:80]}"
    if not _OWN_PAGE.issuperset(header_words(scope, b"sec-fetch-site")):
        return "a page that Sec-Fetch-Site calls another site's"
    return None


class RequireJson:
    """An ASGI middleware that refuses bodies which say that they are anything but JSON, at the paths of
    the APIs: a browser lets any page send texts and files, and nobody else means to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_API_PATHS):
            kinds = [kind.partition(";")[0].strip() for kind in header_words(scope, b"content-type")]
            wrong = next((kind for kind in kinds if kind and not _JSON.fullmatch(kind)), None)
            if wrong is not None:
                error = UnsupportedMedia(
                    f"content-type: {wrong[:80]}; `Content-Type: application/json` is right"
                )
                await error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_own(host: str, allowed: Collection[str]) -> bool:
    """Returns whether no stranger can have made this name lead here: it is an address, this machine's name,
    one that the public DNS cannot have, or the host of an allowed origin."""
    name = host_name(host).removesuffix(".")
    if read_address(name) is not None:
        return True
    hosts = {origin.rpartition("://")[2].partition(":")[0] for origin in allowed}
    return name != "" and (
        "." not in name or name.endswith(_PRIVATE) or name == gethostname().lower() or name in hosts
    )


def host_name(host: str) -> str:
    """Returns the name or the address in a Host header, without a port; empty if there is none."""
    parts = _HOST.fullmatch(host)
    return (parts["ipv6"] or parts["name"]) if parts else ""


def header_words(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of a header whose case does not matter, in small letters."""
    return [line.lower() for line in header_lines(scope, name)]
