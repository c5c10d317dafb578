"""Request bodies: bounds their size and the time that they take to come, and reads them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.api.errors import JSON, MSGPACK, BodyTooLarge, BodyTooSlow, error_response
from kvloom.api.schemas.generation import Body as Form
from kvloom.types.errors import BadRequest, KvloomError, Unavailable

log = logging.getLogger(__name__)

MAX_HELD: Final = 192 << 20  # bytes that all requests together may be taken to hold
SMALL: Final = 1 << 20  # A request that holds more leaves the most room to others.
PARSED: Final = 4  # A body that has been read takes so many times its bytes, beside them.
OPEN_BYTES: Final = 48 << 10  # of a request that is under way, in this process
_ACCOUNT: Final = "kvloom.account"
# A body of nothing but brackets takes forty times its size in memory once it is read.
MAX_CONTAINERS: Final = 200_000
MAX_QUOTES: Final = 1_000_000
_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids, not empty",
    "EmbeddingBody.input": "a text or token ids, or a list of at most 2048 of either, none of them empty",
    "stop": "a string or a list of at most 16 strings, each of 1 to 1024 characters",
}

Body = TypeVar("Body")
B = TypeVar("B", bound=Form)
T = TypeVar("T")


class LimitBody:
    """An ASGI middleware that bounds the size of a request's body and the time that it takes to come.

    It counts the bytes that come, whatever the headers promise. `MAX_HELD` bounds what all requests together
    hold, of which each has an `Account`, and a tenant's requests are bounded by what is free: a large one
    takes its tenant to no more than is left to the others, and a small one to no more than twice that. So one
    tenant fills two thirds at most, and there is room for one more however many there are (Choudhury and
    Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on
    Networking, 1998). The app that reads a body beyond the bounds gets a KvloomError for it.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_seconds: float, tenant_of: Callable[[Scope], str]
    ) -> None:
        """tenant_of: tells for whom a request is made, once that is known, which is before its body is
        read."""
        self._app = app
        self._tenant_of = tenant_of
        self._held = 0
        self._shares: Counter[str] = Counter()  # of that, by tenant; none is zero
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await error_response(scope, _too_large(self._max_bytes))(scope, receive, send)
            return
        # Orders are short, and heard however much the others hold.
        account = Account(_uncounted if scope["path"].startswith("/admin/") else partial(self._hold, scope))
        scope[_ACCOUNT] = account
        body = _BoundedBody(receive, self._max_bytes, self._max_seconds, account)
        try:
            await self._app(scope, body.receive, send)
        finally:
            account.settle(0)

    def _hold(self, scope: Scope, count: int, *, small: bool) -> None:
        tenant = self._tenant_of(scope)
        held, share = self._held + count, self._shares[tenant] + count
        if count > 0 and share > (MAX_HELD - held) * (2 if small else 1):
            raise Unavailable(
                "too many or too large requests and answers at once; send this one again", retry_after=1
            )
        self._held, self._shares[tenant] = held, share
        if not share:
            del self._shares[tenant]


class _Hold(Protocol):
    def __call__(self, count: int, *, small: bool) -> None: ...


def _uncounted(count: int, *, small: bool) -> None:
    """Counts nothing, for bodies that have no account."""


class Account:
    """The bytes of this process that one request is taken to hold, from its body to the end of its answer."""

    def __init__(self, hold: _Hold) -> None:
        self._hold = hold
        self.held = 0

    def add(self, count: int) -> None:
        """Raises Unavailable if all requests together would hold too much."""
        self._hold(count, small=self.held + count <= SMALL)
        self.held += count

    def settle(self, count: int) -> None:
        """Sets what the request holds from now on. Raises Unavailable."""
        self.add(count - self.held)


def account(request: Request) -> Account:
    found: Account = request.scope[_ACCOUNT]
    return found


def _too_large(most: int) -> KvloomError:
    return BodyTooLarge(f"the request body is larger than {most} bytes")


class _BoundedBody:
    """A request's `receive` that raises an error if the body is too large or too slow.

    A client may be quiet for as long as it likes once its body has come.
    """

    def __init__(self, receive: Receive, max_bytes: int, max_seconds: float, account: Account) -> None:
        self._receive = receive
        self._account = account
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._seen = 0
        self._deadline: float | None = None
        self.complete = False

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._max_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"the request body took more than {self._max_seconds:g} s to come") from None
        size = len(message.get("body", b""))
        self._seen += size
        self._account.add(size)
        if self._seen > self._max_bytes:
            raise _too_large(self._max_bytes)
        self.complete = not message.get("more_body", False)
        return message


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """Returns the whole body, which the request does not keep. Raises BadRequest as soon as it is larger than
    `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if limit is not None and len(body) > limit:
            raise BadRequest(f"body: more than {limit} bytes")
    return bytes(body)


def decode(request: Request, body: bytes, kind: type[Body]) -> Body:
    """Returns the body as `kind`. Raises BadRequest that names the field."""
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


def parse(schema: type[B], raw: bytes) -> B:
    """Returns the body of a request to an endpoint of clients. Raises BadRequest that names the field."""
    containers = raw.count(b"[") + raw.count(b"{") + raw.count(b'":')
    if containers > MAX_CONTAINERS or raw.count(b'"') > MAX_QUOTES:
        raise BadRequest(f"the request body has more than {MAX_CONTAINERS} lists, objects and fields")
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise bad_parameter(error) from None
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(schema, raw)
    return body


class _Named(msgspec.Struct):
    """The part of a body that names a model."""

    model: str = ""


_named = msgspec.json.Decoder(_Named)


def named_model(raw: bytes) -> str:
    """Returns the model that a body names, however wrong its other fields are; empty if it names none."""
    try:
        return _named.decode(raw).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def translated(make: Callable[[], T]) -> T:
    """Returns what `make` makes of a request: the same request in another API's form. Raises BadRequest that
    names the field."""
    try:
        return make()
    except ValidationError as error:
        raise bad_parameter(error) from None


def _log_unknown(schema: type[B], raw: bytes) -> None:
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    unknown = sorted(fields.keys() - schema.model_fields.keys())
    if unknown:
        log.debug("ignored unknown fields: %s", ", ".join(unknown))


def bad_parameter(error: ValidationError) -> BadRequest:
    """Returns an error that names the first wrong field, with every form of it that would have been right."""
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
    # A union tells of each of its members. The one that came furthest is the one that was meant.
    deepest = max(mine, key=lambda detail: len(detail["loc"]))
    path = _path(deepest["loc"])
    if form := _FORMS.get(f"{error.title}.{path}"):
        return BadRequest(f"{path}: expected {form}", param=path)
    said = (
        dict.fromkeys(detail["msg"] for detail in mine) if len(path) == len(str(field)) else [deepest["msg"]]
    )
    return BadRequest(f"{path}: {' or '.join(said)}", param=path)


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the field's path as a caller writes it, like `messages[0].content`.

    The names of union members, which pydantic adds, are left out.
    """
    path = str(location[0])
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _is_field(step) and not path.endswith(step):  # a union's tag repeats the field's name
            path += f".{step}"
    return path


def _is_field(step: str) -> bool:
    return step.isidentifier() and step not in {"str", "int", "float", "bool"} and not step[0].isupper()
