"""Answers errors as OpenAI writes them; verbs have a form of their own."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvloom.types.errors import BadRequest, KvloomError, Unauthorized

log = logging.getLogger(__name__)

REQUEST_ID: Final = "x-request-id"
ID_STATE: Final = "kvloom.id"
"""The key under which a request's scope has the id."""
MSGPACK, JSON = "application/msgpack", "application/json"
VERBS_PATH: Final = "/verbs"
MESSAGES_PATH: Final = "/v1/messages"
OLLAMA_PATH: Final = "/api"

_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


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


class RateLimited(KvloomError):
    """A key with a name has used what it may."""

    code: ClassVar[str] = "rate_limit_exceeded"
    status: ClassVar[int] = 429


class NeverFits(RateLimited):
    """A request asks for more than its key may use in a whole minute, so that it never passes as it is."""


class Forbidden(KvloomError):
    """The caller may not do this, with a known key or with none."""

    code: ClassVar[str] = "admin_key_required"
    status: ClassVar[int] = 403


class CertificateRequired(KvloomError):
    code: ClassVar[str] = "client_certificate_required"
    status: ClassVar[int] = 403


class ForeignPage(KvloomError):
    """A page of another site asks, by a browser that was not told so."""

    code: ClassVar[str] = "foreign_origin"
    status: ClassVar[int] = 403


class UnsupportedMedia(KvloomError):
    code: ClassVar[str] = "unsupported_media_type"
    status: ClassVar[int] = 415


class NotServed(KvloomError):
    """An API that clients know has this path, and this server does not serve it."""

    code: ClassVar[str] = "not_served"
    status: ClassVar[int] = 501


class RequestTimeout(KvloomError):
    code: ClassVar[str] = "request_timeout"
    status: ClassVar[int] = 504


def is_verb(scope: Scope) -> bool:
    """Returns whether the path is below /verbs, whether or not there is such a unit and verb."""
    path: str = scope["path"]
    return path == VERBS_PATH or path.startswith(VERBS_PATH + "/")


def is_messages(scope: Scope) -> bool:
    """Returns whether the path is one of Anthropic's API."""
    return f"{scope['path']}/".startswith(MESSAGES_PATH + "/")


def media(request: Request) -> str:
    """Returns the media type of a verb's answer to this request."""
    asked = request.headers.get("accept", ""), request.headers.get("content-type", "")
    return MSGPACK if any("msgpack" in kind for kind in asked) else JSON


def answer(request: Request, value: object, status: int = 200) -> Response:
    kind = media(request)
    encode = msgspec.msgpack.encode if kind == MSGPACK else msgspec.json.encode
    return Response(encode(value), status, media_type=kind)


def json_answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def error_object(error: KvloomError) -> dict[str, Any]:
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": inner}


def messages_error(error: KvloomError) -> dict[str, Any]:
    """Returns the error as Anthropic writes it."""
    kind = _MESSAGES_TYPES.get(error.status) or (
        "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_error(error: KvloomError) -> dict[str, Any]:
    """Returns the error as Ollama writes it."""
    return {"error": error.message}


_FORMS: Final = ((MESSAGES_PATH + "/", messages_error), (OLLAMA_PATH + "/", ollama_error))
"""How errors are written below a path, if that is not as OpenAI writes them."""


def error_response(scope: Scope, error: KvloomError) -> Response:
    """Returns the error as callers of the path read it: a verb's is a `WireError`, and any other's
    form is told by `_FORMS`."""
    request = Request(scope)
    if is_verb(scope):
        response = answer(request, error.to_wire(), error.status)
    else:
        path = f"{scope['path']}/"
        form = next((form for below, form in _FORMS if path.startswith(below)), error_object)
        body = msgspec.json.encode(form(error))
        response = Response(body, status_code=error.status, media_type="application/json")
    response.headers.update(_headers(error))
    return response


def _headers(error: KvloomError) -> dict[str, str]:
    headers: dict[str, str] = {}
    hopeless = isinstance(error, NeverFits)
    if not hopeless and (error.status == 429 or error.retry_after is not None):
        headers["retry-after"] = str(error.retry_after or 1)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["connection"] = "close"  # the rest of the body will not be read
    if hopeless or isinstance(error, RequestTimeout):
        headers["x-should-retry"] = "false"  # OpenAI's clients would try twice more, each in vain or as long
    return headers


def internal_error(error: Exception) -> KvloomError:
    """Logs the error, and returns one for the client that says nothing of what happened."""
    log.error("unexpected error", exc_info=error)
    return KvloomError("an internal error occurred; the server's log has the details")


async def on_kvloom_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvloomError)
    return error_response(request.scope, error)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Answers a client that has hung up before its request or its answer was whole, and so reads nothing."""
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    response = error_response(request.scope, internal_error(error))
    # this answer passes no middleware, which would name the request
    if name := request.scope.get("state", {}).get(ID_STATE):
        response.headers[REQUEST_ID] = name
    return response


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answers an error that Starlette raises: there is no such path, or it does not take the method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    told: KvloomError = BadRequest(f"{where}: refused with status {error.status_code}")
    if error.status_code == 405:
        told = MethodNotAllowed(f"{where}: this path does not take this method")
    elif error.status_code == 404:
        told = NoSuchRoute(f"{where}: no such path")
    response = error_response(request.scope, told)
    response.headers.update(error.headers or {})
    return response
