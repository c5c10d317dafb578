"""What kvloom exports, and what expressions of PromQL ask for."""

from __future__ import annotations

import re

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvloom.api.metrics import KeyCounts, Metrics
from kvloom.types.load import LinkLoad, Waits
from tests.cluster.loads import model, unit

_WAITS = Waits(
    tasks_total=1,
    ahead=0.0,
    parts=1,
    service=0.0,
    wait=0.0,
    beyond=0.0,
    stall=0.0,
    expected_wait=0.0,
    expected_beyond=0.0,
    expected_stall=0.0,
)
SCRAPED = frozenset({"job", "instance"})
"""The labels that Prometheus adds itself."""
_WORDS = frozenset({"and", "or", "unless", "bool", "offset"})
_CLAUSE = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)?\{([^}]*)\}")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*\b(?!\s*\()")


def exported() -> dict[str, set[str]]:
    """Returns the labels of each series that `/metrics` can hold, by its name, and those of `up`."""
    metrics = Metrics()
    watched = (metrics.first_token, metrics.per_token, metrics.latency)
    for one in (*watched, metrics.quarantined, metrics.prompt_tokens, metrics.output_tokens):
        one.labels("m")
    metrics.requests.labels("m", "200")
    load = replace(unit(model()), waits=_WAITS, links={"unit-1": LinkLoad("shm", 1.0)})
    text = metrics.render(
        {"unit-0": load},
        {"unit-0": "up"},
        {"moved": 0},
        {"key": KeyCounts(refusals={"tokens": 1})},
        {("request", "small"): 1},
        nodes={"host-a": "there"},
    ).decode()
    found: dict[str, set[str]] = {"up": set(SCRAPED)}
    for family in text_string_to_metric_families(text):
        assert family.samples, f"{family.name} has no sample here, so that its labels are not known"
        for sample in family.samples:
            found.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    return found


def asked(expression: str) -> tuple[set[str], set[tuple[str, str]], set[str]]:
    """Returns the metrics that an expression names, each label that it selects one by, and the labels by
    which it groups."""
    bare = re.sub(r'"[^"]*"', "", expression)
    selected = {
        (name, label)
        for name, matchers in _SELECTOR.findall(bare)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
    }
    grouped = {label for clause in _CLAUSE.findall(bare) for label in re.findall(r"\w+", clause)}
    for part in (r"\{[^}]*\}", r"\[[^\]]*\]", _CLAUSE.pattern, r"\b\d[\w.]*"):
        bare = re.sub(part, " ", bare)
    return set(_NAME.findall(bare)) - _WORDS, selected, grouped


def problems(expression: str) -> list[str]:
    """Returns what of an expression `/metrics` has not."""
    known = exported()
    names, selected, grouped = asked(expression)
    said = [f"kvloom exports no {name}" for name in sorted(names - known.keys())]
    if said or not names:
        return said or ["no metric is named"]
    said += [f"{name} has no label {label}" for name, label in sorted(selected) if label not in known[name]]
    labels = set[str]().union(*(known[name] for name in names))
    return said + [f"nothing here has a label {label}" for label in sorted(grouped - labels)]
