"""The verbs, as the OpenAPI document tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom.api.verbs import Abort, Done
from kvloom.types.errors import WireError
from kvloom.types.load import UnitLoad
from kvloom.types.request import ModelCard, StartGenerate
from kvloom.types.verbs import (
    Held,
    Hold,
    Lease,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Renew,
    Resume,
    Sent,
    Standing,
    Unpin,
)

Json = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_VERBS: Final[dict[str, tuple[str, type, type]]] = {
    "prep_recv": ("Make room for K and V that a peer will write.", PrepRecv, Prepared),
    "remote_send": ("Write K and V into a peer's room; answered when all has arrived.", RemoteSend, Sent),
    "abort": ("End a request, and give back what it has reserved and pinned.", Abort, Done),
    "renew": ("Keep a request's reservation and pin for another lease.", Renew, Lease),
    "pin": ("Keep what is cached of a prefix, for a request and a time.", Pin, Pinned),
    "unpin": ("Undo a request's pin.", Unpin, Held),
    "hold": ("Let a running request stand still, to go on elsewhere, and send it there.", Hold, Standing),
    "resume": ("Let a held request go on here.", Resume, Done),
    "offer": ("Name a request, running or waiting, that had better go elsewhere.", Offer, Offered),
    "evict": ("Drop what is cached of a prefix, and past it.", Prefix, Held),
}
_BODIES: Final = tuple(kind for _, *pair in _VERBS.values() for kind in pair)


ADMIN_SECURITY: Final[list[Json]] = [{"admin": []}, {}]
_REFUSALS: Final = {
    400: "The body is wrong, or it asks for what cannot be; `message` says why.",
    401: "The key is missing or wrong.",
    403: "The key is no admin key.",
    404: "No such unit or model.",
    408: "The body took too long to come.",
    413: "The body is too large.",
    429: "Too much is under way already; `Retry-After` says when to come again.",
    500: "Something broke; the server's log has the details.",
    503: "The unit is away, or has no room.",
}


def verb_paths(units: Sequence[str]) -> Json:
    stream = {"description": "Lines of JSON, each a list of events.", "content": {"application/x-ndjson": {}}}
    start = _operation("start_generate", "Continue a prompt of token ids.", StartGenerate, None)
    start["responses"]["200"] = stream
    load = _operation("load", "What a unit reports of itself.", None, UnitLoad)
    models = _operation("unit_models", "The cards of the models that a unit serves.", None, None)
    models["responses"]["200"]["content"] = {
        "application/json": {"schema": {"type": "array", "items": _reference(ModelCard)}}
    }
    asked = {
        "load": load,
        "models": models,
        "health": _operation("unit_health", "That it answers.", None, Done),
    }
    done = {name: _operation(name, *described) for name, described in _VERBS.items()}
    verbs = [("post", {"start_generate": start} | done), ("get", asked)]
    return {
        f"/verbs/{{unit}}/{name}": {method: operation | {"parameters": [unit_parameter(units)]}}
        for method, operations in verbs
        for name, operation in operations.items()
    }


def verb_schemas() -> Json:
    return schemas_of(StartGenerate, UnitLoad, ModelCard, Done, WireError, *_BODIES)


def schemas_of(*kinds: type) -> Json:
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    return schemas


def unit_parameter(units: Sequence[str]) -> Json:
    return {"name": "unit", "in": "path", "required": True, "schema": {"type": "string", "enum": [*units]}}


def content(kind: type) -> Json:
    return {"content": {"application/json": {"schema": _reference(kind)}}}


def _operation(name: str, summary: str, body: type | None, answer: type | None) -> Json:
    refusals = {str(status): {"description": said} | content(WireError) for status, said in _REFUSALS.items()}
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "security": ADMIN_SECURITY,
        "responses": {"200": {"description": "Done."} | (content(answer) if answer else {})} | refusals,
    }
    if body is not None:
        operation["requestBody"] = {"required": True} | content(body)
    return operation


def _reference(kind: type) -> Json:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
