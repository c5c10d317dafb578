"""The verbs and the fleet's program, as the OpenAPI document tells of them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvloom.api.verbs import Abort, Done
from kvloom.core.errors import WireError
from kvloom.core.load import UnitLoad
from kvloom.core.request import StartGenerate
from kvloom.core.spec import ProgramSpec
from kvloom.core.verbs import Held, Lease, Prefix, Prepared, PrepRecv, RemoteSend, Renew, Sent

Json = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_VERBS: Final[dict[str, tuple[str, type, type]]] = {
    "prep_recv": ("Make room for K and V that a peer will write.", PrepRecv, Prepared),
    "remote_send": ("Write K and V into a peer's room; answered when all has arrived.", RemoteSend, Sent),
    "abort": ("End a request, and give back what it has reserved.", Abort, Done),
    "renew": ("Keep a reservation for another lease.", Renew, Lease),
    "pin": ("Keep what is cached of a prefix.", Prefix, Held),
    "unpin": ("Undo one pin.", Prefix, Held),
    "evict": ("Drop what is cached of a prefix, and past it.", Prefix, Held),
}
_BODIES: Final = tuple(kind for _, *pair in _VERBS.values() for kind in pair)


def verb_paths() -> Json:
    unit = {"name": "unit", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    stream = {"description": "Lines of JSON, each a list of events.", "content": {"application/x-ndjson": {}}}
    start = _operation("start_generate", "Continue a prompt of token ids.", StartGenerate, None)
    start["responses"]["200"] = stream
    paths: Json = {"/verbs/{unit}/start_generate": {"post": start | {"parameters": [unit]}}}
    for name, (summary, body, answer) in _VERBS.items():
        paths[f"/verbs/{{unit}}/{name}"] = {
            "post": _operation(name, summary, body, answer) | {"parameters": [unit]}
        }
    load = _operation("load", "What a unit reports of itself.", None, UnitLoad)
    paths["/verbs/{unit}/load"] = {"get": load | {"parameters": [unit]}}
    paths["/admin/program"] = {
        "get": _operation("program", "The router program that runs.", None, ProgramSpec),
        "post": _operation("set_program", "Another, for requests from now on.", ProgramSpec, ProgramSpec),
    }
    return paths


def verb_schemas() -> Json:
    _, schemas = msgspec.json.schema_components(
        (StartGenerate, UnitLoad, ProgramSpec, WireError, *_BODIES), ref_template=_REFERENCE
    )
    return schemas


def _operation(name: str, summary: str, body: type | None, answer: type | None) -> Json:
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "Done."} | (_content(answer) if answer else {}),
            "default": {"description": "Refused; `message` says why."} | _content(WireError),
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True} | _content(body)
    return operation


def _content(kind: type) -> Json:
    return {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}}
