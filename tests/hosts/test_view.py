"""What `kvloom serve --cluster` shows of a fleet."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvloom.config.config import DEMO
from kvloom.config.file import Settings
from kvloom.config.machine import Machine
from kvloom.serve.nodes.home import STATE, FleetHome
from kvloom.serve.screen import Screen
from kvloom.serve.systemd import ServiceManager
from kvloom.types.clock import WallClock

pytest.importorskip("ray")
from kvloom.serve.nodes.view import View


def test_a_view_shows_lines_as_the_fleets_settings_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE, str(tmp_path))
    home, clock, shown = FleetHome.of(8000), WallClock(), io.StringIO()
    values = {"models": {"sums": str(DEMO / "sums")}, "log_level": "warning", "log_format": "json"}
    machines = [Machine(2, 1 << 30, name="10.0.0.1")]
    order = home.order(Settings(values=values, folder=str(tmp_path), origin={}), machines, "10.0.0.1")
    screen = Screen(Console(file=shown), clock)
    View(screen, clock, home, order, ServiceManager.named_by({}))
    screen.step("starting the fleet")
    screen.log("unit-0", "INFO kvloom.engine: all is well")
    screen.log("unit-0", "ERROR kvloom.engine: a job failed")
    assert screen.close()
    [line] = map(json.loads, shown.getvalue().splitlines())
    assert (line["level"], line["message"]) == ("error", "a job failed")
