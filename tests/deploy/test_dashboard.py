"""The dashboard, by what Grafana needs of it and by the metrics that kvloom exports. No Grafana draws it."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import jsonschema
import pytest

from tests.deploy.dashboard import DASHBOARD, VARIABLES, Query, drawn, panels, rules
from tests.deploy.promql import problems

SOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
WHOLE = {"type": "integer", "minimum": 0}
PLACE = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {"h": {"minimum": 1}, "w": {"minimum": 1, "maximum": 24}, "x": WHOLE, "y": WHOLE},
}
TARGET = {
    "type": "object",
    "required": ["refId", "datasource", "expr", "legendFormat"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "datasource": SOURCE, "expr": {"minLength": 1}},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "title": {"minLength": 1},
        "type": {"enum": ["row", "timeseries", "stat", "gauge"]},
        "gridPos": PLACE,
    },
    "if": {"properties": {"type": {"not": {"const": "row"}}}},
    "then": {
        "required": ["datasource", "fieldConfig", "options", "targets"],
        "properties": {
            "datasource": SOURCE,
            "targets": {"type": "array", "minItems": 1, "items": TARGET},
            "fieldConfig": {
                "required": ["defaults", "overrides"],
                "properties": {"defaults": {"required": ["unit"], "properties": {"unit": {"minLength": 1}}}},
            },
        },
    },
}
VARIABLE = {
    "type": "object",
    "required": ["name", "label", "type", "query"],
    "if": {"properties": {"type": {"const": "query"}}},
    "then": {"required": ["datasource", "allValue"], "properties": {"datasource": SOURCE}},
    "else": {"properties": {"type": {"const": "datasource"}, "query": {"const": "prometheus"}}},
}
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "time", "templating", "panels"],
    "properties": {
        "panels": {"type": "array", "items": PANEL},
        "templating": {"properties": {"list": {"items": VARIABLE}}},
    },
}


def test_grafana_finds_what_it_needs() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(DASHBOARD, SCHEMA)


def test_a_panel_has_an_id_and_a_place_of_its_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )


def test_it_has_its_rows() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Fleet at a glance",
        "Memory by model",
        "Latency by model",
        "Queues",
        "Prefixes",
        "Moves, preemptions and wakes",
        "Weaving",
        "Gateways",
    ]


def test_its_variables_are_those_that_it_asks_by() -> None:
    names = [variable["name"] for variable in VARIABLES]
    assert names == ["datasource", "job", "unit", "model"]
    used = {name for panel in panels() for name in re.findall(r"\$\{?(\w+)", str(panel))}
    assert used == {*names, "__rate_interval"}


@pytest.mark.parametrize("query", [*drawn()], ids=lambda query: query.where)
def test_a_panel_asks_for_what_kvloom_exports(query: Query) -> None:
    assert problems(query.expression) == []


@pytest.mark.parametrize("variable", VARIABLES[1:], ids=lambda variable: variable["name"])
def test_a_variable_asks_for_what_kvloom_exports(variable: dict[str, Any]) -> None:
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
    assert found is not None
    assert problems(f"count by ({found[2]}) ({found[1]})") == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_kvloom_exports_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert problems(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sum(kvloom_request_total)", "kvloom exports no kvloom_request_total"),
        ('rate(kvloom_moves_total{unit="a"}[1m])', "kvloom_moves_total has no label unit"),
        ("max by (node) (kvloom_engines_up) > 0", "nothing here has a label node"),
        ("kvloom_engines_up and on (job) kvloom_none", "kvloom exports no kvloom_none"),
        ("1 + vector(0)", "no metric is named"),
    ],
)
def test_what_is_not_exported_is_told(expression: str, said: str) -> None:
    assert problems(expression) == [said]
