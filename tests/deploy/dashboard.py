"""The dashboard and the rules of deploy/, as tests read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
DASHBOARD: Final[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "kvloom.json").read_text("utf-8"))
SCRAPE: Final = DEPLOY / "prometheus" / "prometheus.yml"
RULES: Final = DEPLOY / "prometheus" / "kvloom.rules.yml"
VARIABLES: Final[list[dict[str, Any]]] = DASHBOARD["templating"]["list"]


class Query(NamedTuple):
    """An expression, and where it stands."""

    where: str
    expression: str


def panels() -> list[dict[str, Any]]:
    """Returns all panels but the rows' headings."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def drawn() -> Iterator[Query]:
    """Yields the dashboard's queries as Grafana would ask them, with all chosen of each variable."""
    chosen = {name["name"]: name.get("allValue", "") for name in VARIABLES} | {"__rate_interval": "1m"}
    for panel in panels():
        for target in panel["targets"]:
            asked = re.sub(r"\$(\w+)", lambda found: chosen[found[1]], target["expr"])
            yield Query(f"{panel['title']}, {target['legendFormat']}", asked)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]
