"""Closing of JSON schemas: a guide over an open one would let a model write for as long as it may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

MOST_CHARACTERS: Final = 16_384
"""The most characters of a string that has no bound of its own."""
MOST_INTEGER: Final = 10**15
"""The largest integer, if it has no bound of its own; floats hold every integer up to there exactly."""

_SEVERAL: Final = ("properties", "$defs", "definitions")  # keywords of schemas by name
_LISTED: Final = ("anyOf", "oneOf", "prefixItems")
_ONE: Final = ("items", "additionalProperties")
_OBJECT: Final = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties"}
    | {"maxProperties", "dependentRequired", "propertyNames"}
)
_UNSURE: Final = frozenset(
    {"allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "contains"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
)
"""Keywords with which one schema may depend on what another allows."""
_MORE: Final = frozenset({"patternProperties", "minProperties", "dependentRequired", "propertyNames"})
"""Keywords by which an object may be meant to have properties that it does not list."""
_BOUNDS: Final = frozenset(
    {"enum", "const", "maxLength", "pattern", "format"}
    | {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "multipleOf"}
)


def closed(schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Returns the schema as OpenAI's strict mode has it: an object that lists its properties has no others.
    A model may otherwise add properties for as long as it may write. Strings and integers without a bound
    get one for the same reason. A schema whose parts depend on each other stays as it is.

    strict: objects are closed also if they say otherwise, or list none.
    """
    return _closed(schema, strict) if _is_plain(schema) else schema


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _SEVERAL:
        yield from parts.values() if isinstance(parts := schema.get(key), dict) else ()
    for key in _LISTED:
        yield from parts if isinstance(parts := schema.get(key), list) else ()
    for key in _ONE:
        yield schema.get(key)


def _is_plain(schema: Any) -> bool:
    """Returns whether each part says by itself what it allows."""
    if not isinstance(schema, dict):
        return True
    chosen = {"anyOf", "oneOf", "$ref"} & schema.keys()
    several = len(chosen) > 1 or (chosen and _OBJECT & schema.keys())
    overlaps = "oneOf" in chosen and "discriminator" not in schema
    unsure = several or overlaps or _UNSURE & schema.keys()
    return not unsure and all(map(_is_plain, _parts(schema)))


def _with_closed_parts(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    made = dict(schema)
    for key in _SEVERAL:
        if isinstance(parts := made.get(key), dict):
            made[key] = {name: _closed(part, strict) for name, part in parts.items()}
    for key in _LISTED:
        if isinstance(parts := made.get(key), list):
            made[key] = [_closed(part, strict) for part in parts]
    for key in _ONE:
        if key in made:
            made[key] = _closed(made[key], strict)
    return made


def _lists_all(schema: dict[str, Any]) -> bool:
    """Returns whether an object needs no property that it does not list."""
    listed, needed = schema.get("properties", {}), schema.get("required", [])
    known = isinstance(listed, dict) and isinstance(needed, list) and not _MORE & schema.keys()
    return known and all(isinstance(one, str) and one in listed for one in needed)


def _closed(schema: Any, strict: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = _with_closed_parts(schema, strict)
    kinds = made.get("type")
    kinds = {one for one in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(one, str)}
    if _lists_all(made):
        if strict and ("properties" in made or "object" in kinds):
            made["additionalProperties"] = False
        elif "properties" in made:
            made.setdefault("additionalProperties", False)
    if not _BOUNDS & made.keys():
        if "string" in kinds:
            made["maxLength"] = max(MOST_CHARACTERS, _number(made.get("minLength")))
        if "integer" in kinds:
            made |= {"minimum": -MOST_INTEGER, "maximum": MOST_INTEGER}
    return made


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
