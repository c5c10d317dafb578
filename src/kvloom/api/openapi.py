"""The API described by itself: an OpenAPI 3.1 document and a page to read."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvloom.api.openapi_admin import admin_paths, admin_schemas
from kvloom.api.openapi_verbs import verb_paths, verb_schemas
from kvloom.api.schemas import ErrorAnswer, ModelAnswer, ModelList
from kvloom.api.schemas_chat import ChatAnswer, ChatBody, ChatChunk
from kvloom.api.schemas_completion import CompletionAnswer, CompletionBody

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model or path.",
    408: "The body took too long to come.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "Something broke; the server's log has the details.",
    503: "The engine is away.",
}


def describe(*, units: Sequence[str] = ()) -> Json:
    """units: whose verbs, and how they are administered, are told of too."""
    inputs: list[type[BaseModel]] = [CompletionBody, ChatBody]
    outputs: list[type[BaseModel]] = [
        CompletionAnswer, ChatAnswer, ChatChunk, ModelAnswer, ModelList, ErrorAnswer
    ]  # fmt: skip
    _, schemas = models_json_schema(
        [(one, "validation") for one in inputs] + [(one, "serialization") for one in outputs],
        ref_template=_REFERENCE,
    )
    paths, components = _paths(), schemas["$defs"]
    if units:
        paths |= admin_paths(units) | verb_paths(units)
        components |= admin_schemas() | verb_schemas()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvloom",
            "version": _version(),
            "description": "Many LLMs woven over one KV cache, behind the OpenAI API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key."},
                "admin": {"type": "http", "scheme": "bearer", "description": "An admin key."},
            },
        },
    }


def _version() -> str:
    try:
        return version("kvloom")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _paths() -> Json:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models": {"get": _operation("models", "The models served.", _ok(ModelList), 401, 500, 503)},
        "/v1/models/{model}": {
            "get": _operation("model", "One model.", _ok(ModelAnswer), 401, 404, 500, 503)
            | {"parameters": [name]}
        },
        "/v1/completions": {
            "post": _operation(
                "completions", "Continue prompts.", _ok(CompletionAnswer, CompletionAnswer), *_FAILURES
            )
            | _body(CompletionBody)
        },
        "/v1/chat/completions": {
            "post": _operation(
                "chat_completions", "Answer a conversation.", _ok(ChatAnswer, ChatChunk), *_FAILURES
            )
            | _body(ChatBody)
        },
        "/health": {"get": _operation("health", "200 where requests are taken.", _plain(), 503) | _open()},
        "/metrics": {"get": _operation("metrics", "Prometheus metrics.", _plain("text/plain"), 401, 500)},
        "/openapi.json": {"get": _operation("openapi", "This document.", _plain()) | _open()},
        "/docs": {"get": _operation("docs", "A page to read.", _plain("text/html")) | _open()},
    }


def _operation(name: str, summary: str, answer: Json, *failures: int) -> Json:
    responses = {"200": answer}
    for status in failures:
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        responses[str(status)] = {"description": _FAILURES[status], "content": content}
    return {"operationId": name, "summary": summary, "responses": responses}


def _ok(answer: type[BaseModel], chunk: type[BaseModel] | None = None) -> Json:
    content: Json = {"application/json": {"schema": _reference(answer)}}
    if chunk is not None:
        said = f"With `stream`: server-sent events of {chunk.__name__}, then `[DONE]`."
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event | {"description": said}}
    return {"description": "Done.", "content": content}


def _plain(media: str = "application/json") -> Json:
    kind = "object" if media == "application/json" else "string"
    return {"description": "Done.", "content": {media: {"schema": {"type": kind}}}}


def _body(schema: type[BaseModel]) -> Json:
    content = {"application/json": {"schema": _reference(schema)}}
    return {"requestBody": {"required": True, "content": content}}


def _open() -> Json:
    return {"security": []}


def _reference(schema: type[BaseModel]) -> Json:
    return {"$ref": _REFERENCE.format(model=schema.__name__)}


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
code{background:#f1f3f5;padding:.1em .3em;border-radius:3px}table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #dde1e6;padding:.35rem .6rem;text-align:left;vertical-align:top}
h2{margin-top:2.5rem}.verb{color:#fff;background:#2f6f4f;padding:.1em .5em;border-radius:3px}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#dfe3e8}code{background:#262b31}}
"""


def page(document: Json) -> str:
    """All in one: no script, nothing from elsewhere."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvloom API</title><style>{_STYLE}</style>",
        f"<h1>kvloom API</h1><p>{escape(document['info']['description'])} "
        "The machine's version: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for verb, operation in methods.items():
            parts.append(_operation_html(document, path, verb, operation))
    return "\n".join(parts)


def _operation_html(document: Json, path: str, verb: str, operation: Json) -> str:
    rows = [
        f"<tr><td>{status}<td>{escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    ]
    html = f"<h2><span class=verb>{verb.upper()}</span> <code>{escape(path)}</code></h2>"
    html += f"<p>{escape(operation['summary'])}</p>"
    if "requestBody" in operation:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        html += f"<p>{escape(schema.get('description', ''))}</p>{_fields_html(schema)}"
    return html + f"<table><tr><th>Status<th>Meaning{''.join(rows)}</table>"


def _fields_html(schema: Json) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}<td>{escape(_kind(field))}"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>Field (* required)<th>Form{''.join(rows)}</table>"


def _kind(field: Json) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(_kind(one) for one in field[key] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return " | ".join(str(one) for one in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    limits = [(">=", "minimum"), (">", "exclusiveMinimum"), ("<=", "maximum"), ("<", "exclusiveMaximum")]
    bounds = [f"{sign} {field[key]}" for sign, key in limits if key in field]
    return " ".join([kind, ", ".join(bounds)]).strip()
