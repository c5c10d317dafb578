"""Every route of a gateway, in one table, from which its ASGI routes and its OpenAPI document are made.

A new endpoint is a row here, or in `api.admin_routes`, and a handler under the row's name in the `handlers`
of `create_app` (`api.app`) or of `Admin.routes` (`api.admin`). A new verb of an engine is a row of the table
in `types.verbs`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvloom.api.errors import JSON, MESSAGES_PATH, OLLAMA_PATH
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
from kvloom.api.schemas.ollama import (
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaEmbedAnswer,
    OllamaEmbedBody,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsBody,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateBody,
    OllamaProcesses,
    OllamaShow,
    OllamaShowBody,
    OllamaTags,
    OllamaVersion,
)
from kvloom.api.schemas.responses import (
    ResponseAnswer,
    ResponseDeleted,
    ResponseEvent,
    ResponseItems,
    ResponsesBody,
)
from kvloom.page import PAGE_PATH

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


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One method of one path."""

    method: Literal["GET", "POST", "DELETE"]
    name: str  # the handler's, and the operation's in the document
    path: str  # as Starlette writes it
    summary: str
    body: Any  # pydantic's or msgspec's type; None if there is no body
    answer: Any  # likewise; None if the media type says all
    errors: tuple[int, ...]  # statuses that the keys, the body and bugs do not explain
    caller: Caller = Caller.ADMIN
    media: str = JSON
    chunk: Any = None  # the type of an event's data, if a request may ask for a stream
    stream: str = EVENTS  # the media type of such a stream
    last: str = "then `[DONE]`"  # what the document says of the end of a stream of events
    note: str = "Done."  # what the document says of the answer
    most: int = MAX_ORDER  # bytes of a body
    error: type = ErrorAnswer

    @property
    def statuses(self) -> list[int]:
        """Returns the statuses of all errors that the route may answer with."""
        keys = {Caller.ANYONE: (), Caller.KEY: (401, 403, 500), Caller.ADMIN: (401, 403, 500)}[self.caller]
        body = () if self.body is None else (400, 408, 413)
        return sorted({*self.errors, *keys, *body})


def get(name: str, path: str, summary: str, answer: Any, *errors: int, **more: Any) -> RouteRow:
    return RouteRow("GET", name, path, summary, None, answer, errors, **more)


def post(name: str, path: str, summary: str, body: Any, answer: Any, *errors: int, **more: Any) -> RouteRow:
    return RouteRow("POST", name, path, summary, body, answer, errors, **more)


_RESPONSE: Final = "/v1/responses/{response}"


def _ollama(row: Callable[..., RouteRow], name: str, summary: str, *forms: Any) -> RouteRow:
    """Returns the row of a path of Ollama's. forms: of the body, if there is one, and of the answer, and
    statuses of errors."""
    path, more = f"{OLLAMA_PATH}/{name}", {"caller": Caller.KEY, "error": OllamaError}
    stream = {"chunk": forms[1], "stream": LINES} if name in ("chat", "generate") else {}
    return row(f"ollama_{name}", path, summary, *forms, **more, **stream)


_BUSY: Final = (404, 415, 429, 503)

PUBLIC: Final[tuple[RouteRow, ...]] = (
    get("models", "/v1/models", "Lists the models served.", ModelList, 503, caller=Caller.KEY),
    get("model", "/v1/models/{model:path}", "Describes one model.", ModelAnswer, 404, 503, caller=Caller.KEY),
    post(
        "completions",
        "/v1/completions",
        "Continues prompts.",
        CompletionBody,
        CompletionAnswer,
        *(404, 415, 429, 503, 504),
        chunk=CompletionAnswer,
        caller=Caller.KEY,
    ),
    post(
        "chat_completions",
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatBody,
        ChatAnswer,
        *(404, 415, 429, 503, 504),
        chunk=ChatChunk,
        caller=Caller.KEY,
    ),
    post(
        "responses",
        "/v1/responses",
        "Answers a conversation of items, and keeps the answer for a while.",
        ResponsesBody,
        ResponseAnswer,
        *(404, 415, 429, 503, 504),
        chunk=ResponseEvent,
        last="the last of which is `response.completed`, `response.incomplete` or `response.failed`",
        caller=Caller.KEY,
    ),
    get("response", _RESPONSE, "Returns a kept answer.", ResponseAnswer, 400, 404, caller=Caller.KEY),
    RouteRow(
        "DELETE",
        "delete_response",
        _RESPONSE,
        "Forgets a kept answer.",
        None,
        ResponseDeleted,
        (404,),
        Caller.KEY,
    ),
    get(
        "response_items",
        _RESPONSE + "/input_items",
        "Lists what a kept answer's conversation held before it: `?limit=`, `?order=asc`, `?after=`.",
        ResponseItems,
        *(400, 404),
        caller=Caller.KEY,
    ),
    post(
        "embeddings",
        "/v1/embeddings",
        "Makes embeddings of texts.",
        EmbeddingBody,
        EmbeddingAnswer,
        *(404, 415, 429, 503, 504),
        caller=Caller.KEY,
    ),
    *(
        post(
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
        post(
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
    post(
        "messages",
        MESSAGES_PATH,
        "Answers a conversation, as Anthropic does.",
        MessagesBody,
        Message,
        *(404, 415, 429, 503, 504),
        chunk=MessageEvent,
        last="the last of which is `message_stop`, or `error`",
        caller=Caller.KEY,
        error=MessagesError,
    ),
    post(
        "count_tokens",
        MESSAGES_PATH + "/count_tokens",
        "Counts the tokens of a conversation, as Anthropic does.",
        CountBody,
        TokenCount,
        *(404, 415, 429, 503),
        caller=Caller.KEY,
        error=MessagesError,
    ),
    post(
        "tokenize",
        "/tokenize",
        "Makes tokens of a text or a conversation.",
        TokenizeBody,
        TokenizeAnswer,
        *(404, 415, 429, 503),
        caller=Caller.KEY,
    ),
    post(
        "detokenize",
        "/detokenize",
        "Makes a text of tokens.",
        DetokenizeBody,
        DetokenizeAnswer,
        *(404, 415, 429, 503),
        caller=Caller.KEY,
    ),
    get(
        "tokenizer_info",
        "/tokenizer_info",
        "Tells special tokens and chat template of a model, `?model=`, or of the only one.",
        dict[str, Any],
        *(400, 404, 503),
        caller=Caller.KEY,
    ),
    _ollama(
        post,
        "chat",
        "Answers a conversation, as Ollama does.",
        OllamaChatBody,
        OllamaChatAnswer,
        *_BUSY,
        504,
    ),
    _ollama(
        post,
        "generate",
        "Answers a prompt, as Ollama does.",
        OllamaGenerateBody,
        OllamaGenerateAnswer,
        *(*_BUSY, 504),
    ),
    _ollama(
        post,
        "embed",
        "Makes embeddings of texts, as Ollama does.",
        OllamaEmbedBody,
        OllamaEmbedAnswer,
        *(*_BUSY, 504),
    ),
    _ollama(
        post,
        "embeddings",
        "Makes an embedding of one text, as Ollama did.",
        OllamaEmbeddingsBody,
        OllamaEmbeddingsAnswer,
        *(*_BUSY, 504),
    ),
    _ollama(get, "tags", "Lists the models served, as Ollama does.", OllamaTags, 503),
    _ollama(get, "ps", "Lists the models whose weights are in memory, as Ollama does.", OllamaProcesses, 503),
    _ollama(post, "show", "Describes one model, as Ollama does.", OllamaShowBody, OllamaShow, *_BUSY),
    _ollama(get, "version", "Tells the version of Ollama's API that this one follows.", OllamaVersion),
    get("health", "/health", "Answers 200 if requests are taken.", None, 503, caller=Caller.ANYONE),
    get("metrics", "/metrics", "Tells Prometheus' metrics.", None, 403, media=TEXT, caller=Caller.KEY),
    get("openapi", "/openapi.json", "Returns this document.", None, caller=Caller.ANYONE),
    get("docs", "/docs", "Shows this document as a page.", None, media=HTML, caller=Caller.ANYONE),
)

PAGE: Final[tuple[RouteRow, ...]] = (
    get("page", "/", "Shows the fleet.", None, caller=Caller.ANYONE, media=HTML),
    get(
        "page_part", PAGE_PATH + "{file}", "A part of the page.", None, 404, caller=Caller.ANYONE, media=TEXT
    ),
)
"""The routes that browsers ask for. They are no part of the API, and not of its document."""


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
