"""Errors as OpenAI writes them, and those of verbs as verbs do, whatever raised them."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvloom.api.wire import answer, is_verb
from kvloom.types.errors import BadRequest, KvloomError, Unauthorized

log = logging.getLogger(__name__)

_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids, not empty",
    "stop": "a string or a list of at most 16 strings, each of 1 to 1024 characters",
}
_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class BodyTooLarge(KvloomError):
    code: ClassVar[str] = "body_too_large"
    status: ClassVar[int] = 413


class BodyTooSlow(KvloomError):
    code: ClassVar[str] = "body_too_slow"
    status: ClassVar[int] = 408


class MethodNotAllowed(KvloomError):
    code: ClassVar[str] = "method_not_allowed"
    status: ClassVar[int] = 405


class NoSuchRoute(KvloomError):
    code: ClassVar[str] = "not_found"
    status: ClassVar[int] = 404


class Forbidden(KvloomError):
    """The caller is known, or has no need to be, but may not do this."""

    code: ClassVar[str] = "admin_key_required"
    status: ClassVar[int] = 403


def error_object(error: KvloomError) -> dict[str, Any]:
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": inner}


def error_response(scope: Scope, error: KvloomError) -> Response:
    """In the one form that callers of the path read: a verb's are `WireError`s, all others OpenAI's."""
    request = Request(scope)
    if is_verb(scope):
        response = answer(request, error.to_wire(), error.status)
    else:
        body = msgspec.json.encode(error_object(error))
        response = Response(body, status_code=error.status, media_type="application/json")
    response.headers.update(_headers(error))
    return response


def _headers(error: KvloomError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.status == 429 or error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after or 1)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["connection"] = "close"  # the rest of the body will not be read
    return headers


def internal_error(error: Exception) -> KvloomError:
    """For the client: no word of what happened. For the log: all of it."""
    log.error("unexpected error", exc_info=error)
    return KvloomError("an internal error occurred; the server's log has the details")


async def on_kvloom_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, KvloomError) else internal_error(error)
    return error_response(request.scope, known)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """The client hung up before its request or its answer was whole: nobody reads this."""
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(request.scope, internal_error(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    where = f"{request.method} {request.url.path}"
    if status == 405:
        response = error_response(
            request.scope, MethodNotAllowed(f"{where}: this path does not take this method")
        )
    elif status == 404:
        response = error_response(request.scope, NoSuchRoute(f"{where}: no such path"))
    else:
        response = error_response(request.scope, BadRequest(f"{where}: refused with status {status}"))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def bad_parameter(error: ValidationError) -> BadRequest:
    """The first field that is wrong, with every form of it that would have been right."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    first = details[0]
    if first["type"].startswith("field:"):
        return BadRequest(first["msg"], param=first["type"].removeprefix("field:"))
    if not first["loc"]:
        return BadRequest(f"the request body is wrong: {first['msg']}")
    field = first["loc"][0]
    if field in _FORMS:
        return BadRequest(f"{field}: expected {_FORMS[field]}", param=str(field))
    mine = [detail for detail in details if detail["loc"][0] == field]
    # A union tells of each of its members; the one that came furthest is the one that was meant.
    deepest = max(mine, key=lambda detail: len(detail["loc"]))
    path = _path(deepest["loc"])
    said = (
        dict.fromkeys(detail["msg"] for detail in mine) if len(path) == len(str(field)) else [deepest["msg"]]
    )
    return BadRequest(f"{path}: {' or '.join(said)}", param=path)


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content: without the names of union members, which are pydantic's own."""
    path = str(location[0])
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _is_field(step) and not path.endswith(step):  # a union's tag repeats the field's name
            path += f".{step}"
    return path


def _is_field(step: str) -> bool:
    return step.isidentifier() and step not in {"str", "int", "float", "bool"} and not step[0].isupper()
