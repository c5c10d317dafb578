"""The OpenAPI 3.1 document that is made from the table of routes, and a page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, get_args, get_origin

import msgspec
from jinja2 import Environment
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from kvloom.api.admin_routes import ADMIN, UNIT_VERBS
from kvloom.api.errors import JSON
from kvloom.api.routes import EVENTS, LINES, PUBLIC, Caller, RouteRow

Json = dict[str, Any]

_SCHEMAS: Final = "#/components/schemas/"
_MEANINGS: Final = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The key does not open this, or a page of another site asks, which `allow_origins` does not name.",
    404: "No such model, path, or kept answer.",
    408: "The body took too long to come.",
    413: "The body is too large.",
    415: "The body says that it is not JSON.",
    429: "The queue is full, or the key has used what it may; `Retry-After` says when to come again.",
    500: "Something broke; the server's log has the details.",
    503: "The engine cannot be reached.",
    504: "The request took longer than the server's `request_timeout`.",
}
_ADMIN_MEANINGS: Final = _MEANINGS | {
    400: "The body is wrong; the message says what would be right.",
    401: "The key is missing or wrong.",
    403: "The key is no admin key, or a client certificate is missing.",
    404: "No such unit.",
    409: "What is asked for would upset something that is under way; the message says what.",
    503: "The new process died as it started; it is tried again.",
}
_VERB_MEANINGS: Final = _ADMIN_MEANINGS | {
    400: "The body is wrong, or it asks for what cannot be; `message` says why.",
    404: "No such unit or model.",
    429: "Too much is under way already; `Retry-After` says when to come again.",
    503: "The unit is away, or has no room.",
}
_SECURITY: Final[dict[Caller, list[Json]]] = {
    Caller.ANYONE: [],
    Caller.KEY: [{"key": []}, {}],
    Caller.ADMIN: [{"admin": []}, {}],
}


def describe(*, units: Sequence[str] = ()) -> Json:
    """Returns the document. If there are `units`, it tells of their administration and verbs, too."""
    groups = [(PUBLIC, _MEANINGS)]
    if units:
        groups += [(ADMIN, _ADMIN_MEANINGS), (UNIT_VERBS, _VERB_MEANINGS)]
    paths: Json = {}
    for rows, meanings in groups:
        for row in rows:
            methods = paths.setdefault(row.path.replace(":path", ""), {})
            methods[row.method.lower()] = _operation(row, meanings, units)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvloom",
            "version": _version(),
            "description": "Many LLMs woven over one KV cache, behind the OpenAI API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": _SECURITY[Caller.KEY],
        "paths": paths,
        "components": {
            "schemas": _components(row for rows, _ in groups for row in rows),
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


def _operation(row: RouteRow, meanings: dict[int, str], units: Sequence[str]) -> Json:
    answers: Json = {"200": {"description": row.note, "content": _content(row)}}
    for status in row.statuses:
        answers[str(status)] = {
            "description": meanings[status],
            "content": {JSON: {"schema": _schema(row.error)}},
        }
    operation: Json = {"operationId": row.name, "summary": row.summary, "responses": answers}
    if row.caller is not Caller.KEY:
        operation["security"] = _SECURITY[row.caller]
    if row.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(row.body)}}}
    for name, schema in (
        ("model", {"minLength": 1}),
        ("name", {"minLength": 1}),
        ("node", {"minLength": 1}),
        ("response", {"minLength": 1}),
        ("unit", {"enum": [*units]}),
    ):
        if f"{{{name}" in row.path:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"} | schema}
            ]
    return operation


def _content(row: RouteRow) -> Json:
    """Returns what the answer is, by its media type. A schema cannot tell of lines of JSON, or of events."""
    schema = (
        {"type": "object" if row.media == JSON else "string"} if row.answer is None else _schema(row.answer)
    )
    content: Json = {row.media: {} if row.media in (LINES, EVENTS) else {"schema": schema}}
    if row.chunk is not None and row.stream != EVENTS:
        content[row.stream] = {}
    elif row.chunk is not None:
        said = f"With `stream`: server-sent events of {row.chunk.__name__}, {row.last}."
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content[EVENTS] = {"schema": event | {"description": said}}
    return content


def _schema(kind: Any) -> Json:
    """Returns a reference to the schema of a type, or of a list of that type."""
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(*get_args(kind))}
    return {"$ref": _SCHEMAS + kind.__name__}


def _components(rows: Iterable[RouteRow]) -> Json:
    """Returns the schemas of all types that the rows name, made by pydantic and msgspec."""
    models: dict[type[BaseModel], JsonSchemaMode] = {}
    others = []
    for row in rows:
        for kind in (row.body, row.answer, row.chunk, row.error):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                models[kind] = "validation" if kind is row.body else "serialization"
            elif kind is not None:
                others.append(kind)
    _, made = models_json_schema([*models.items()], ref_template=_SCHEMAS + "{model}")
    _, components = msgspec.json.schema_components(others, ref_template=_SCHEMAS + "{name}")
    return {**made["$defs"], **components}


_PAGE: Final = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!doctype html>
<html lang=en>
<meta charset=utf-8>
<title>kvloom API</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
code{background:#f1f3f5;padding:.1em .3em;border-radius:3px}table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #dde1e6;padding:.35rem .6rem;text-align:left;vertical-align:top}
h2{margin-top:2.5rem}.method{color:#fff;background:#2f6f4f;padding:.1em .5em;border-radius:3px}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#dfe3e8}code{background:#262b31}}
</style>
<h1>kvloom API</h1>
<p>{{ document.info.description }} The machine's version: <a href=openapi.json>openapi.json</a>.</p>
{% for path, methods in document.paths.items() %}
{% for method, operation in methods.items() %}
<h2><span class=method>{{ method.upper() }}</span> <code>{{ path }}</code></h2>
<p>{{ operation.summary }}</p>
{% if operation.requestBody %}
{% set reference = operation.requestBody.content["application/json"].schema["$ref"] %}
{% set schema = document.components.schemas[reference.rpartition("/")[2]] %}
<p>{{ schema.description }}</p>
<table><tr><th>Field (* required)<th>Form
{% for name, field in schema.properties.items() %}
<tr><td><code>{{ name }}</code>{{ " *" if name in schema.required }}<td>{{ form(field) }}
{% endfor %}
</table>
{% endif %}
<table><tr><th>Status<th>Meaning
{% for status, answer in operation.responses.items() %}
<tr><td>{{ status }}<td>{{ answer.description }}
{% endfor %}
</table>
{% endfor %}
{% endfor %}
""")


def page(document: Json) -> str:
    """Returns the document as one page, which has no script and loads nothing."""
    return _PAGE.render(document=document, form=_form)


@dataclass(frozen=True, slots=True)
class Written:
    """Both documents, as they are sent."""

    units: tuple[str, ...]
    description: bytes
    page: bytes


class Documents:
    """The documents for the units that there are, made once for each change of the units: it takes tens of
    milliseconds, and anyone may ask."""

    def __init__(self, units: Callable[[], Iterable[str]]) -> None:
        self._units = units
        self._written: Written | None = None

    def made(self) -> Written:
        units = tuple(self._units())
        if self._written is None or self._written.units != units:
            document = describe(units=units)
            self._written = Written(units, msgspec.json.encode(document), page(document).encode())
        return self._written


def _form(field: Json) -> str:
    """Returns in words what a field takes."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(_form(one) for one in field[key] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return " | ".join(str(one) for one in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_form(field.get('items', {}))}"
    limits = [(">=", "minimum"), (">", "exclusiveMinimum"), ("<=", "maximum"), ("<", "exclusiveMaximum")]
    bounds = [f"{sign} {field[key]}" for sign, key in limits if key in field]
    return " ".join([kind, ", ".join(bounds)]).strip()
