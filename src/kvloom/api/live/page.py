"""The page of a fleet, and its parts. They hold no data: the page asks for that with its reader's key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.errors import NoSuchRoute
from kvloom.page import POLICY, served_files

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


async def serve_page(request: Request) -> Response:
    """Returns the file that the path names, or the page itself."""
    name = request.path_params.get("file", "")
    if name not in served_files() or (not name and request.url.path != "/"):
        raise NoSuchRoute(f"the page has no part {name!r}")
    content, media = served_files()[name]
    return Response(content, media_type=media, headers=_HEADERS)
