"""Every route of a gateway, in one table, from which its ASGI routes and its OpenAPI document are made.

A new endpoint is a row here, and a handler under the row's name in the `handlers` of `create_app` (`api.app`)
or of `Admin.routes` (`api.admin`). A new verb of an engine is a row of the table in `types.verbs`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvloom.api.errors import JSON, MESSAGES_PATH
from kvloom.api.schemas.chat import (
    ChatAnswer,
    ChatBody,
    ChatChunk,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from kvloom.api.schemas.embeddings import (
    EmbeddingAnswer,
    EmbeddingBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
)
from kvloom.api.schemas.generation import (
    CompletionAnswer,
    CompletionBody,
    ErrorAnswer,
    ModelAnswer,
    ModelList,
)
from kvloom.api.schemas.messages import (
    CountBody,
    Message,
    MessageEvent,
    MessagesBody,
    MessagesError,
    TokenCount,
)
from kvloom.cluster.models import AddModel, Applied, Apply, ModelState
from kvloom.journal.lives import Life, LifeLine
from kvloom.page import PAGE_PATH
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

Handler = Callable[[Request], Awaitable[Response]]

LINES, TEXT, HTML = "application/x-ndjson", "text/plain", "text/html"
EVENTS: Final = "text/event-stream"


class Caller(Enum):
    """The callers of a route. Every path below /admin and /verbs is an admin's, in this table or not."""

    ANYONE = "anyone"
    KEY = "whoever has a key, if there are API keys"
    ADMIN = "whoever has an admin key"


LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_ORDER: Final = 1 << 16
MAX_CONFIG: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One method of one path."""

    method: Literal["GET", "POST"]
    name: str  # the handler's, and the operation's in the document
    path: str  # as Starlette writes it
    summary: str
    body: Any  # pydantic's or msgspec's type; None if there is no body
    answer: Any  # likewise; None if the media type says all
    errors: tuple[int, ...]  # statuses that the keys, the body and bugs do not explain
    caller: Caller = Caller.ADMIN
    media: str = JSON
    chunk: Any = None  # the type of an event's data, if a request may ask for a stream
    note: str = "Done."  # what the document says of the answer
    most: int = MAX_ORDER  # bytes of a body
    error: type = ErrorAnswer

    @property
    def statuses(self) -> list[int]:
        """Returns the statuses of all errors that the route may answer with."""
        keys = {Caller.ANYONE: (), Caller.KEY: (401, 403, 500), Caller.ADMIN: (401, 403, 500)}[self.caller]
        body = () if self.body is None else (400, 408, 413)
        return sorted({*self.errors, *keys, *body})


def _get(name: str, path: str, summary: str, answer: Any, *errors: int, **more: Any) -> RouteRow:
    return RouteRow("GET", name, path, summary, None, answer, errors, **more)


def _post(name: str, path: str, summary: str, body: Any, answer: Any, *errors: int, **more: Any) -> RouteRow:
    return RouteRow("POST", name, path, summary, body, answer, errors, **more)


def _order(name: str, summary: str, body: type, *errors: int) -> RouteRow:
    """Returns the row of an order to one unit, which is answered with the unit's state."""
    return _post(name, f"/admin/units/{{unit}}/{name}", summary, body, UnitState, 404, 409, *errors)


def _verb(name: str, summary: str, body: Any, answer: Any, **more: Any) -> RouteRow:
    """Returns the row of one unit's verb, which the gateway passes on to it."""
    operation = f"unit_{name}" if name in ("models", "health") else name
    path, errors = f"/verbs/{{unit}}/{name}", (400, 404, 408, 413, 429, 503)
    more["error"] = WireError
    if body is None:
        return _get(operation, path, summary, answer, *errors, **more)
    return _post(operation, path, summary, body, answer, *errors, **more)


PUBLIC: Final[tuple[RouteRow, ...]] = (
    _get("models", "/v1/models", "Lists the models served.", ModelList, 503, caller=Caller.KEY),
    _get(
        "model", "/v1/models/{model:path}", "Describes one model.", ModelAnswer, 404, 503, caller=Caller.KEY
    ),
    _post(
        "completions",
        "/v1/completions",
        "Continues prompts.",
        CompletionBody,
        CompletionAnswer,
        *(404, 415, 429, 503, 504),
        chunk=CompletionAnswer,
        caller=Caller.KEY,
    ),
    _post(
        "chat_completions",
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatBody,
        ChatAnswer,
        *(404, 415, 429, 503, 504),
        chunk=ChatChunk,
        caller=Caller.KEY,
    ),
    _post(
        "embeddings",
        "/v1/embeddings",
        "Makes embeddings of texts.",
        EmbeddingBody,
        EmbeddingAnswer,
        *(404, 415, 429, 503, 504),
        caller=Caller.KEY,
    ),
    *(
        _post(
            name,
            path,
            "Sorts documents by how well they answer a query, as vLLM and Cohere do.",
            RerankBody,
            RerankAnswer,
            *(404, 415, 429, 503, 504),
            caller=Caller.KEY,
        )
        for name, path in (("rerank", "/rerank"), ("rerank_v1", "/v1/rerank"), ("rerank_v2", "/v2/rerank"))
    ),
    *(
        _post(
            name,
            path,
            "Scores pairs of texts, as vLLM does.",
            ScoreBody,
            ScoreAnswer,
            *(404, 415, 429, 503, 504),
            caller=Caller.KEY,
        )
        for name, path in (("score", "/score"), ("score_v1", "/v1/score"))
    ),
    _post(
        "messages",
        MESSAGES_PATH,
        "Answers a conversation, as Anthropic does.",
        MessagesBody,
        Message,
        *(404, 415, 429, 503, 504),
        chunk=MessageEvent,
        caller=Caller.KEY,
        error=MessagesError,
    ),
    _post(
        "count_tokens",
        MESSAGES_PATH + "/count_tokens",
        "Counts the tokens of a conversation, as Anthropic does.",
        CountBody,
        TokenCount,
        *(404, 415, 429, 503),
        caller=Caller.KEY,
        error=MessagesError,
    ),
    _post(
        "tokenize",
        "/tokenize",
        "Makes tokens of a text or a conversation.",
        TokenizeBody,
        TokenizeAnswer,
        *(404, 429, 503),
        caller=Caller.KEY,
    ),
    _post(
        "detokenize",
        "/detokenize",
        "Makes a text of tokens.",
        DetokenizeBody,
        DetokenizeAnswer,
        *(404, 429, 503),
        caller=Caller.KEY,
    ),
    _get(
        "tokenizer_info",
        "/tokenizer_info",
        "Tells special tokens and chat template of a model, `?model=`, or of the only one.",
        dict[str, Any],
        *(400, 404, 503),
        caller=Caller.KEY,
    ),
    _get("health", "/health", "Answers 200 if requests are taken.", None, 503, caller=Caller.ANYONE),
    _get("metrics", "/metrics", "Tells Prometheus' metrics.", None, 403, media=TEXT, caller=Caller.KEY),
    _get("openapi", "/openapi.json", "Returns this document.", None, caller=Caller.ANYONE),
    _get("docs", "/docs", "Shows this document as a page.", None, media=HTML, caller=Caller.ANYONE),
)

PAGE: Final[tuple[RouteRow, ...]] = (
    _get("page", "/", "Shows the fleet.", None, caller=Caller.ANYONE, media=HTML),
    _get(
        "page_part", PAGE_PATH + "{file}", "A part of the page.", None, 404, caller=Caller.ANYONE, media=TEXT
    ),
)
"""What browsers ask for. It is no part of the API, and not of its document."""

ADMIN: Final[tuple[RouteRow, ...]] = (
    _get("program", "/admin/program", "Tells the router program that runs.", ProgramState),
    _post(
        "set_program",
        "/admin/program",
        "Sets another router program, for requests from now on.",
        ProgramSpec,
        ProgramState,
        409,
    ),
    _post(
        "restart_all",
        "/admin/restart",
        "Restarts the whole fleet, one component after the other.",
        Drain,
        RestartStep,
        409,
        media=LINES,
        note="Lines of JSON, each a step; the last tells how it ended.",
    ),
    _get("fleet", "/admin/fleet", "Tells what the fleet scheduler decides by.", FleetState),
    _post("pair", "/admin/pairs", "Lets requests move between these units, and no others.", Pairs, Pairs),
    _post("scale", "/admin/scale", "Lets these units come, and those go.", Steps, Steps, 409),
    _get(
        "events",
        "/admin/events",
        "Tells what has happened to the fleet in the last hour, and then what happens.",
        None,
        media=EVENTS,
        note="Server-sent events, each a record of the journal. `Last-Event-ID` leaves out what came before.",
    ),
    _get(
        "live",
        "/admin/live",
        "Tells what each unit and model had in the last hour, and then what they have, each second.",
        None,
        media=EVENTS,
        note="Server-sent events: one `history` of samples, and then each `sample`. `Last-Event-ID` leaves "
        "out those up to it.",
    ),
    _get(
        "requests",
        "/admin/requests",
        "Lists the last requests of this gateway, newest first.",
        list[LifeLine],
    ),
    _get(
        "request",
        "/admin/requests/{name:path}",
        "Tells the life of a request, by its x-request-id, by its answer's id, or by a unit's id for it.",
        Life,
        404,
    ),
    _get("placement", "/admin/placement", "Tells which units there are and may be.", Placement),
    _get("units", "/admin/units", "Tells whether each unit takes requests.", list[UnitState]),
    _post("add", "/admin/units", "Starts a unit that was not there.", EngineSpec, UnitState, 409, 503),
    _get("unit", "/admin/units/{unit}", "Tells whether a unit takes requests.", UnitState, 404),
    _get(
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
    _get("nodes", "/admin/nodes", "Tells which nodes there are, and what runs there.", list[NodeState]),
    _post(
        "drain_node",
        "/admin/nodes/{node}/drain",
        "Has everything on a node start elsewhere; answered when nothing runs there.",
        Drain,
        NodeState,
        404,
        409,
    ),
    _post(
        "admit_node", "/admin/nodes/{node}/admit", "Undoes the drain of a node.", Admit, NodeState, 404, 409
    ),
    _get("admin_models", "/admin/models", "Tells which units serve which models.", list[ModelState]),
    _post(
        "add_model",
        "/admin/models",
        "Adds a model, and answers when it is served.",
        AddModel,
        ModelState,
        409,
        503,
    ),
    _post(
        "remove_model",
        "/admin/models/{name:path}/remove",
        "Removes a model, once its requests have ended or had their time.",
        Drain,
        ModelState,
        404,
        409,
    ),
    _post(
        "apply",
        "/admin/config",
        "Tells what a config would change, and changes it if asked to.",
        Apply,
        Applied,
        409,
        most=MAX_CONFIG,
    ),
    _post(
        "load_lora_adapter",
        LOAD_LORA,
        "Serves another LoRA adapter, as vLLM does, once each unit that serves its base has proven it.",
        LoadLora,
        None,
        *(409, 503),
        media=TEXT,
    ),
    _post(
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


def asgi_routes(rows: Iterable[RouteRow], handlers: Mapping[str, Handler]) -> list[BaseRoute]:
    """Returns a route for each path. Raises KeyError if a row has no handler."""
    paths: dict[str, dict[str, Handler]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method] = handlers[row.name]
    return [Route(path, _by_method(methods), methods=list(methods)) for path, methods in paths.items()]


def _by_method(methods: Mapping[str, Handler]) -> Handler:
    async def handle(request: Request) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](request)

    return handle
