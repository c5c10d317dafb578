"""Bodies and answers of the verbs: msgpack or JSON, read by their content-type, written as was asked.

Answers are msgpack where the body was or `accept` asks for it. Errors are `WireError`s, whatever they are of.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvloom.types.errors import BadRequest

MSGPACK, JSON = "application/msgpack", "application/json"
VERBS: Final = "/verbs"

Body = TypeVar("Body")


def is_verb(scope: Scope) -> bool:
    """Whether the path is a verb's, or would be if there were such a unit or verb."""
    path: str = scope["path"]
    return path == VERBS or path.startswith(VERBS + "/")


def media(request: Request) -> str:
    """What the answer to this request is written in."""
    asked = request.headers.get("accept", ""), request.headers.get("content-type", "")
    return MSGPACK if any("msgpack" in kind for kind in asked) else JSON


def answer(request: Request, value: object, status: int = 200) -> Response:
    kind = media(request)
    encode = msgspec.msgpack.encode if kind == MSGPACK else msgspec.json.encode
    return Response(encode(value), status, media_type=kind)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BadRequest as soon as it is larger than `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BadRequest(f"body: more than {limit} bytes")
    return bytes(body)


def decode(request: Request, body: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises BadRequest that names the field."""
    written = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if written == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        if written == JSON:
            value = msgspec.json.decode(body, type=kind)
            msgspec.msgpack.encode(value)  # engines are asked in msgpack, which holds less than JSON
            return value
    except (msgspec.MsgspecError, OverflowError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from error
    raise BadRequest(f"content-type: {written or 'none'}; `Content-Type: {JSON}`, or {MSGPACK}, is right")
