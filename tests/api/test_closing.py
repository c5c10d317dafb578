"""Schemas are closed: what a model may write after one comes to an end, and is what the schema allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvloom.api.schemas.closing import MOST_CHARACTERS, MOST_INTEGER, closed
from kvloom.types.request import JSON_SPACING
from tests.api.scripted import UNTIMED, byte_level

TEXT = {"type": "string", "maxLength": 9}
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
SHUT: dict[str, Any] = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (OPEN, SHUT),
        (OPEN | {"additionalProperties": True}, OPEN | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"b": OPEN}}, {"properties": {"b": SHUT}, "additionalProperties": False}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": SHUT}),
        ({"$defs": {"d": OPEN}, "$ref": "#/$defs/d"}, {"$defs": {"d": SHUT}, "$ref": "#/$defs/d"}),
        ({"anyOf": [OPEN, TEXT]}, {"anyOf": [SHUT, TEXT]}),
        ({"type": "object", "additionalProperties": OPEN}, {"type": "object", "additionalProperties": SHUT}),
        ({"type": "string"}, {"type": "string", "maxLength": MOST_CHARACTERS}),
        ({"type": "string", "pattern": "a+"}, {"type": "string", "pattern": "a+"}),
        (
            {"type": ["integer", "null"]},
            {"type": ["integer", "null"], "minimum": -MOST_INTEGER, "maximum": MOST_INTEGER},
        ),
        ({"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 0}),
        ({"properties": 7, "anyOf": {}, "type": [3]}, {"properties": 7, "anyOf": {}, "type": [3]}),
    ],
)
def test_a_schema_is_closed_where_it_lists_its_properties(
    schema: dict[str, Any], made: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert closed(schema) == made
    assert json.dumps(schema) == before
    assert closed(made) == made


@pytest.mark.parametrize(
    "schema",
    [
        OPEN | {"anyOf": [{"required": ["c"]}]},
        {"allOf": [OPEN, {"required": ["c"]}]},
        {
            "$defs": {"d": OPEN},
            "allOf": [{"$ref": "#/$defs/d"}, {"properties": {"x": TEXT}, "required": ["x"]}],
        },
        {"type": "object", "properties": {"k": TEXT}, "anyOf": [{"properties": {"a": TEXT}}]},
        {"$defs": {"d": OPEN}, "$ref": "#/$defs/d", "properties": {"x": TEXT}},
        {"oneOf": [OPEN, {"type": "object", "properties": {"b": TEXT}}]},
        {"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]},
        OPEN | {"minProperties": 2},
        OPEN | {"unevaluatedProperties": TEXT},
        {"properties": {"a": OPEN | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}}},
        {"type": {"type": "string"}},
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_whose_parts_depend_on_each_other_stays_as_it_is(
    schema: dict[str, Any], strict: bool
) -> None:
    assert closed(schema, strict=strict) == schema


def test_strict_closes_what_says_otherwise() -> None:
    assert closed(OPEN | {"additionalProperties": True}, strict=True) == SHUT
    assert closed({"type": "object"}, strict=True) == {"type": "object", "additionalProperties": False}


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from("abc"), parts, min_size=1)
    return fields.flatmap(
        lambda given: st.builds(
            lambda required, more: {"type": "object", "properties": given, "required": required} | more,
            st.lists(st.sampled_from(sorted(given)), unique=True),
            st.sampled_from([{}, {"additionalProperties": True}]),
        )
    )


LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"enum": [1, "a"]}])
SCHEMAS = st.recursive(LEAVES, lambda parts: _objects(parts) | st.builds(lambda one: {"anyOf": [one]}, parts))
VALUES = st.recursive(
    st.integers(-9, 9) | st.sampled_from("ab") | st.booleans(),
    lambda parts: st.dictionaries(st.sampled_from("abcd"), parts, max_size=3),
)


@UNTIMED
@given(SCHEMAS, VALUES, st.booleans())
def test_what_a_closed_schema_allows_the_schema_allows(schema: Any, value: Any, strict: bool) -> None:
    def allows(given: Any) -> bool:
        return bool(jsonschema.Draft202012Validator(given).is_valid(value))

    assert allows(schema) or not allows(closed(schema, strict=strict))


def test_a_model_can_but_end_what_is_closed() -> None:
    tokenizer = byte_level()
    schema = closed({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema | {"x-guidance": JSON_SPACING}))
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str()), grammar)
    digits = "9" * len(str(MOST_INTEGER - 1))
    for token in tokenizer.encode('{"a": ' + digits, add_special_tokens=False).ids:
        assert matcher.consume_token(token)
    mask = matcher.compute_logit_bias()
    assert [tokenizer.id_to_token(at) for at, allowed in enumerate(mask) if allowed] == ["}"]
