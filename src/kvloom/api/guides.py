"""What an answer must follow, out of OpenAI's `response_format` or vLLM's parameters."""

from __future__ import annotations

import json
from typing import Any

from kvloom.api.schemas import GenerationBody, JsonObjectFormat, JsonSchemaFormat
from kvloom.types.request import Guide


def guide_of(body: GenerationBody) -> Guide | None:
    """The one guide that a request asks for; its form allows no second."""
    for name, value in body.guides.items():
        return _guide(name, value)
    return None


def _guide(name: str, value: Any) -> Guide:
    if isinstance(value, JsonObjectFormat):
        return Guide("json", param=name)
    if isinstance(value, JsonSchemaFormat):
        return Guide("json_schema", json.dumps(value.json_schema.schema_), name)
    if name.endswith("regex"):
        return Guide("regex", value, name)
    if name.endswith("json"):
        return Guide("json_schema", value if isinstance(value, str) else json.dumps(value), name)
    if name.endswith("choice"):
        value = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
    return Guide("lark", value, name)
