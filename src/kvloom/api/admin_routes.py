"""The routes of an administrator: orders to the fleet, and the verbs of its units. They are rows as of
`api.routes`."""

from __future__ import annotations

from typing import Any, Final

from kvloom.api.routes import EVENTS, LINES, LOAD_LORA, TEXT, UNLOAD_LORA, RouteRow, get, post
from kvloom.cluster.models import AddModel, Applied, Apply, ModelState
from kvloom.journal.lives import Life, LifeLine
from kvloom.journal.traffic import TrafficHour
from kvloom.types.errors import WireError
from kvloom.types.request import ModelCard, StartGenerate
from kvloom.types.service import (
    Admit,
    Drain,
    FleetState,
    LoadLora,
    NodeState,
    Pairs,
    Placement,
    ProgramState,
    RestartStep,
    Steps,
    UnitState,
    UnloadLora,
)
from kvloom.types.spec import EngineSpec, ProgramSpec
from kvloom.types.verbs import VERBS, Done

MAX_CONFIG: Final = 1 << 19


def _order(name: str, summary: str, body: type, *errors: int) -> RouteRow:
    """Returns the row of an order to one unit, which is answered with the unit's state."""
    return post(name, f"/admin/units/{{unit}}/{name}", summary, body, UnitState, 404, 409, *errors)


def _verb(name: str, summary: str, body: Any, answer: Any, **more: Any) -> RouteRow:
    """Returns the row of one unit's verb, which the gateway passes on to it."""
    operation = f"unit_{name}" if name in ("models", "health") else name
    path, errors = f"/verbs/{{unit}}/{name}", (400, 404, 408, 413, 429, 503)
    more["error"] = WireError
    if body is None:
        return get(operation, path, summary, answer, *errors, **more)
    return post(operation, path, summary, body, answer, *errors, **more)


ADMIN: Final[tuple[RouteRow, ...]] = (
    get("program", "/admin/program", "Tells the router program that runs.", ProgramState),
    post(
        "set_program",
        "/admin/program",
        "Sets another router program, for requests from now on.",
        ProgramSpec,
        ProgramState,
        409,
    ),
    post(
        "restart_all",
        "/admin/restart",
        "Restarts the whole fleet, one component after the other.",
        Drain,
        RestartStep,
        409,
        media=LINES,
        note="Lines of JSON, each a step; the last tells how it ended.",
    ),
    get("fleet", "/admin/fleet", "Tells what the fleet scheduler decides by.", FleetState),
    post("pair", "/admin/pairs", "Lets requests move between these units, and no others.", Pairs, Pairs),
    post("scale", "/admin/scale", "Lets these units come, and those go.", Steps, Steps, 409),
    get(
        "events",
        "/admin/events",
        "Tells what has happened to the fleet in the last hour, and then what happens.",
        None,
        media=EVENTS,
        note="Server-sent events, each a record of the journal. `Last-Event-ID` leaves out what came before.",
    ),
    get(
        "live",
        "/admin/live",
        "Tells what each unit and model had in the last hour, and then what they have, each second.",
        None,
        media=EVENTS,
        note="Server-sent events: one `history` of samples, and then each `sample`. `Last-Event-ID` leaves "
        "out those up to it.",
    ),
    get(
        "requests",
        "/admin/requests",
        "Lists the last requests of this gateway, newest first.",
        list[LifeLine],
    ),
    get(
        "request",
        "/admin/requests/{name:path}",
        "Tells the life of a request, by its x-request-id, by its answer's id, or by a unit's id for it.",
        Life,
        404,
    ),
    get(
        "traffic",
        "/admin/traffic",
        "Tells what the fleet was asked, by model and hour.",
        TrafficHour,
        503,
        media=LINES,
        note="Lines of JSON, each an hour of a model: counts and lengths alone.",
    ),
    get(
        "host_traffic",
        "/admin/traffic/host",
        "Tells the same of the gateways of this one's host.",
        TrafficHour,
        503,
        media=LINES,
        note="Lines of JSON, as of `/admin/traffic`.",
    ),
    get("placement", "/admin/placement", "Tells which units there are and may be.", Placement),
    get("units", "/admin/units", "Tells whether each unit takes requests.", list[UnitState]),
    post("add", "/admin/units", "Starts a unit that was not there.", EngineSpec, UnitState, 409, 503),
    get("unit", "/admin/units/{unit}", "Tells whether a unit takes requests.", UnitState, 404),
    get(
        "cards",
        "/admin/units/{unit}/cards",
        "Tells what a unit serves, or has served last.",
        list[ModelCard],
        404,
    ),
    _order(
        "drain",
        "Gives a unit no new request; answered when those it has are done, or have had their time.",
        Drain,
    ),
    _order("admit", "Undoes drain.", Admit),
    _order(
        "restart",
        "Drains a unit, puts a new process in its place, and admits that; answered then.",
        Drain,
        503,
    ),
    _order("start", "Gives a unit that has none a process.", Admit, 503),
    _order("stop", "Drains a unit and ends its process; requests that only it can answer wait.", Drain),
    _order("remove", "Forgets a unit that has no process.", Admit),
    get("nodes", "/admin/nodes", "Tells which nodes there are, and what runs there.", list[NodeState]),
    post(
        "drain_node",
        "/admin/nodes/{node}/drain",
        "Has everything on a node start elsewhere; answered when nothing runs there.",
        Drain,
        NodeState,
        404,
        409,
    ),
    post(
        "admit_node", "/admin/nodes/{node}/admit", "Undoes the drain of a node.", Admit, NodeState, 404, 409
    ),
    get("admin_models", "/admin/models", "Tells which units serve which models.", list[ModelState]),
    post(
        "add_model",
        "/admin/models",
        "Adds a model, and answers when it is served.",
        AddModel,
        ModelState,
        409,
        503,
    ),
    post(
        "remove_model",
        "/admin/models/{name:path}/remove",
        "Removes a model, once its requests have ended or had their time.",
        Drain,
        ModelState,
        404,
        409,
    ),
    post(
        "apply",
        "/admin/config",
        "Tells what a config would change, and changes it if asked to.",
        Apply,
        Applied,
        409,
        most=MAX_CONFIG,
    ),
    post(
        "load_lora_adapter",
        LOAD_LORA,
        "Serves another LoRA adapter, as vLLM does, once each unit that serves its base has proven it.",
        LoadLora,
        None,
        *(409, 503),
        media=TEXT,
    ),
    post(
        "unload_lora_adapter",
        UNLOAD_LORA,
        "Serves no new request of a LoRA adapter; those that run go on to their end.",
        UnloadLora,
        None,
        *(404, 409, 503),
        media=TEXT,
    ),
)

UNIT_VERBS: Final[tuple[RouteRow, ...]] = (
    _verb(
        "start_generate",
        "Continues a prompt of token ids.",
        StartGenerate,
        None,
        media=LINES,
        note="Lines of JSON, each a list of events.",
    ),
    *(_verb(verb.name, verb.summary, None if verb.reports else verb.body, verb.answer) for verb in VERBS),
    _verb("health", "Answers if the unit does.", None, Done),
)
