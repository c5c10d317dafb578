"""Closes JSON schemas, so that a model which follows one comes to an end."""

from __future__ import annotations

from typing import Any, Final

MOST_CHARACTERS: Final = 16_384
"""Of a string that has no bound of its own."""
MOST_INTEGER: Final = 10**15
"""Of an integer that has no bound of its own; floats hold every integer up to there exactly."""

_SEVERAL: Final = ("properties", "$defs", "definitions")  # keywords of schemas by name
_LISTED: Final = ("anyOf", "oneOf", "prefixItems")
_ONE: Final = ("items", "additionalProperties")
_COMBINED: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "patternProperties"}
)
"""Keywords by which other schemas may name further properties of the same object."""
_BOUNDS: Final = frozenset(
    {"enum", "const", "maxLength", "pattern", "format"}
    | {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "multipleOf"}
)


def closed(schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Returns the schema as OpenAI's strict mode has it: an object that lists its properties has no others.
    A model may otherwise add properties for as long as it may write. Strings and integers without a bound
    get one for the same reason.

    strict: objects are closed also if they say otherwise, or list none. Parts of `allOf` stay as they are,
    since each of them sees the properties of all.
    """
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
    kinds = made.get("type")
    kinds = {one for one in kinds if isinstance(one, str)} if isinstance(kinds, list) else {kinds}
    if not _COMBINED & made.keys():
        if strict and "object" in kinds:
            made["additionalProperties"] = False
        elif isinstance(made.get("properties"), dict):
            made.setdefault("additionalProperties", False)
    if not _BOUNDS & made.keys():
        if "string" in kinds:
            made["maxLength"] = max(MOST_CHARACTERS, _number(made.get("minLength")))
        if "integer" in kinds:
            made |= {"minimum": -MOST_INTEGER, "maximum": MOST_INTEGER}
    return made


def _closed(part: Any, strict: bool) -> Any:
    return closed(part, strict=strict) if isinstance(part, dict) else part


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
