"""What those who run a fleet may ask, as the OpenAPI document tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvloom.api.openapi_verbs import ADMIN_SECURITY, content, schemas_of, unit_parameter
from kvloom.api.schemas import ErrorAnswer
from kvloom.core.placement import Placement
from kvloom.core.replicas import Steps
from kvloom.core.rescheduling import FleetState, Pairs
from kvloom.core.service import Admit, Drain, RestartStep, UnitState
from kvloom.core.spec import EngineSpec, ProgramSpec

Json = dict[str, Any]

_REFUSALS: Final = {
    400: "The body is wrong; the message says what would be right.",
    401: "The key is missing or wrong.",
    403: "The key is no admin key.",
    404: "No such unit.",
    408: "The body took too long to come.",
    409: "What is asked for would upset something that is under way; the message says what.",
    413: "The body is too large.",
    500: "Something broke; the server's log has the details.",
    503: "The new process died as it started; it is tried again.",
}
_ANY: Final = (401, 403, 500)
_BODY: Final = (400, 408, 413, *_ANY)


def admin_paths(units: Sequence[str]) -> Json:
    unit = {"parameters": [unit_parameter(units)]}
    return {
        "/admin/program": {
            "get": _operation("program", "The router program that runs.", None, ProgramSpec, *_ANY),
            "post": _operation(
                "set_program", "Another, for requests from now on.", ProgramSpec, ProgramSpec, 409, *_BODY
            ),
        },
        "/admin/restart": {"post": _restart()},
        "/admin/fleet": {
            "get": _operation("fleet", "What the fleet scheduler decides by.", None, FleetState, *_ANY)
        },
        "/admin/pairs": {
            "post": _operation(
                "pair", "Let requests move between these units, and no others.", Pairs, Pairs, *_BODY
            )
        },
        "/admin/scale": {
            "post": _operation("scale", "Let these units come, and those go.", Steps, Steps, 409, *_BODY)
        },
        "/admin/placement": {
            "get": _operation("placement", "Which units there are and may be.", None, Placement, *_ANY)
        },
        "/admin/units": {
            "get": _units(),
            "post": _operation(
                "add", "Start a unit that was not there.", EngineSpec, UnitState, 409, 503, *_BODY
            ),
        },
        "/admin/units/{unit}": {
            "get": _operation("unit", "Whether a unit takes requests.", None, UnitState, 404, *_ANY) | unit
        },
        "/admin/units/{unit}/drain": {
            "post": _operation(
                "drain",
                "Give a unit no new request; answered when those it has are done, or have had their time.",
                Drain,
                UnitState,
                *(404, 409, *_BODY),
            )
            | unit
        },
        "/admin/units/{unit}/admit": {
            "post": _operation("admit", "Undo drain.", Admit, UnitState, 404, 409, *_BODY) | unit
        },
        "/admin/units/{unit}/restart": {
            "post": _operation(
                "restart",
                "Drain a unit, put a new process in its place, and admit that; answered then.",
                Drain,
                UnitState,
                *(404, 409, 503, *_BODY),
            )
            | unit
        },
        "/admin/units/{unit}/start": {
            "post": _operation(
                "start", "Give a unit that has none a process.", Admit, UnitState, 404, 409, 503, *_BODY
            )
            | unit
        },
        "/admin/units/{unit}/stop": {
            "post": _operation(
                "stop",
                "Drain a unit and end its process; requests that only it can answer wait.",
                Drain,
                UnitState,
                *(404, 409, *_BODY),
            )
            | unit
        },
        "/admin/units/{unit}/remove": {
            "post": _operation(
                "remove", "Forget a unit that has no process.", Admit, UnitState, 404, 409, *_BODY
            )
            | unit
        },
    }


def admin_schemas() -> Json:
    return schemas_of(
        Placement, EngineSpec, ProgramSpec, FleetState, Pairs, Steps, UnitState, RestartStep, Drain, Admit
    )


def _units() -> Json:
    operation = _operation("units", "Whether each unit takes requests.", None, UnitState, *_ANY)
    answer = operation["responses"]["200"]["content"]["application/json"]
    answer["schema"] = {"type": "array", "items": answer["schema"]}
    return operation


def _restart() -> Json:
    operation = _operation(
        "restart_all",
        "Restart the whole fleet, one component after the other.",
        Drain,
        RestartStep,
        409,
        *_BODY,
    )
    operation["responses"]["200"] = {
        "description": "Lines of JSON, each a step; the last tells how it ended.",
        "content": {"application/x-ndjson": {}},
    }
    return operation


def _operation(name: str, summary: str, body: type | None, answer: type, *refusals: int) -> Json:
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "security": ADMIN_SECURITY,
        "responses": {"200": {"description": "Done."} | content(answer)}
        | {
            str(status): {"description": _REFUSALS[status]} | content(ErrorAnswer)
            for status in sorted(refusals)
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True} | content(body)
    return operation
