"""A fleet's files on its controller's host let the next controller go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.config.file import Settings
from kvloom.config.machine import Machine
from kvloom.serve.nodes.home import STATE, FleetHome
from kvloom.types.errors import ConfigError

NODES = [Machine(2, 1 << 30, name="10.0.0.1"), Machine(4, 1 << 30, name="10.0.0.2")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetHome:
    monkeypatch.setenv(STATE, str(tmp_path))
    return FleetHome.of(8000)


def settings(**changed: object) -> Settings:
    return Settings(values={"port": 8000} | changed, folder="/work", origin={})


def test_a_fleet_that_was_not_ended_is_found_again(home: FleetHome) -> None:
    first = home.order(settings(), NODES, "10.0.0.1")
    later = FleetHome.of(8000).order(settings(), NODES[:1], "10.0.0.1")
    assert later == first, "with the nodes that it began with"
    assert home.has(first)
    assert (home.folder / "order.json").stat().st_mode & 0o077 == 0, "nobody else reads the secret"


def test_one_that_was_ended_is_not(home: FleetHome) -> None:
    first = home.order(settings(), NODES, "10.0.0.1")
    home.spec.write_text("{}")
    home.end()
    assert not home.has(first)
    assert not home.spec.exists()
    assert home.order(settings(), NODES, "10.0.0.1").secret != first.secret


def test_another_config_begins_another_fleet(home: FleetHome) -> None:
    first = home.order(settings(), NODES, "10.0.0.1")
    home.spec.write_text("{}")
    other = home.order(settings(policy="fcfs"), NODES, "10.0.0.1")
    assert other.secret != first.secret
    assert not home.spec.exists(), "what the other fleet has become is nothing to this one"
    assert FleetHome.of(8001).order(settings(), NODES, "10.0.0.1").secret != other.secret


def test_another_config_is_refused_while_the_fleet_is_served(
    home: FleetHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = home.order(settings(), NODES, "10.0.0.1")
    monkeypatch.setattr("kvloom.serve.nodes.home.address_at", lambda lock: str(lock == home.lock))
    with pytest.raises(ConfigError, match="a fleet of another config is served"):
        home.order(settings(policy="fcfs"), NODES, "10.0.0.1")
    assert home.order(settings(), NODES, "10.0.0.1") == first


def test_a_disk_without_room_is_told(home: FleetHome) -> None:
    home.folder.parent.parent.mkdir(parents=True)
    home.folder.parent.write_text("no folder can be made here")
    with pytest.raises(ConfigError, match=r"order cannot be written .*; a folder with room is right"):
        home.order(settings(), NODES, "10.0.0.1")
