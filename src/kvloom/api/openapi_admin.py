"""What those who run a fleet may ask, as the OpenAPI document tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvloom.api.openapi_verbs import ADMIN_SECURITY, content, schemas_of, unit_parameter
from kvloom.api.schemas import ErrorAnswer
from kvloom.types.service import Admit, Drain, FleetState, Pairs, Placement, RestartStep, Steps, UnitState
from kvloom.types.spec import EngineSpec, ProgramSpec

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
    of_one = {
        f"/admin/units/{{unit}}{path}": {method: operation | unit for method, operation in own.items()}
        for path, own in _of_a_unit().items()
    }
    return _of_the_fleet() | of_one


def _of_the_fleet() -> Json:
    return {
        "/admin/program": {
            "get": _get("program", "The router program that runs.", ProgramSpec),
            "post": _post("set_program", "Another, for requests from now on.", ProgramSpec, ProgramSpec, 409),
        },
        "/admin/restart": {"post": _restart()},
        "/admin/fleet": {"get": _get("fleet", "What the fleet scheduler decides by.", FleetState)},
        "/admin/pairs": {
            "post": _post("pair", "Let requests move between these units, and no others.", Pairs, Pairs)
        },
        "/admin/scale": {"post": _post("scale", "Let these units come, and those go.", Steps, Steps, 409)},
        "/admin/placement": {"get": _get("placement", "Which units there are and may be.", Placement)},
        "/admin/units": {
            "get": _units(),
            "post": _post("add", "Start a unit that was not there.", EngineSpec, UnitState, 409, 503),
        },
    }


def _of_a_unit() -> Json:
    """By what comes after the unit's name."""

    def post(name: str, summary: str, body: type, *refusals: int) -> Json:
        return {"post": _post(name, summary, body, UnitState, 404, 409, *refusals)}

    return {
        "": {"get": _get("unit", "Whether a unit takes requests.", UnitState, 404)},
        "/drain": post(
            "drain",
            "Give a unit no new request; answered when those it has are done, or have had their time.",
            Drain,
        ),
        "/admit": post("admit", "Undo drain.", Admit),
        "/restart": post(
            "restart",
            "Drain a unit, put a new process in its place, and admit that; answered then.",
            Drain,
            503,
        ),
        "/start": post("start", "Give a unit that has none a process.", Admit, 503),
        "/stop": post(
            "stop", "Drain a unit and end its process; requests that only it can answer wait.", Drain
        ),
        "/remove": post("remove", "Forget a unit that has no process.", Admit),
    }


def admin_schemas() -> Json:
    return schemas_of(
        Placement, EngineSpec, ProgramSpec, FleetState, Pairs, Steps, UnitState, RestartStep, Drain, Admit
    )


def _units() -> Json:
    operation = _get("units", "Whether each unit takes requests.", UnitState)
    answer = operation["responses"]["200"]["content"]["application/json"]
    answer["schema"] = {"type": "array", "items": answer["schema"]}
    return operation


def _restart() -> Json:
    operation = _post(
        "restart_all", "Restart the whole fleet, one component after the other.", Drain, RestartStep, 409
    )
    operation["responses"]["200"] = {
        "description": "Lines of JSON, each a step; the last tells how it ended.",
        "content": {"application/x-ndjson": {}},
    }
    return operation


def _get(name: str, summary: str, answer: type, *refusals: int) -> Json:
    return _operation(name, summary, None, answer, *refusals, *_ANY)


def _post(name: str, summary: str, body: type, answer: type, *refusals: int) -> Json:
    return _operation(name, summary, body, answer, *refusals, *_BODY)


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
