"""The units of systemd, by systemd itself where it is, and by what they must say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))
KVLOOM = "/opt/kvloom/bin/kvloom"
KEYS = {
    "Unit": {"Description", "After", "Wants"},
    "Service": {
        *("Type", "NotifyAccess", "User", "StateDirectory", "Environment", "EnvironmentFile"),
        *("ExecStartPre", "ExecStart", "Restart", "RestartSec", "TimeoutStartSec", "TimeoutStopSec"),
        *("KillMode", "OOMPolicy", "LimitNOFILE", "TasksMax", "WatchdogSec"),
    },
    "Install": {"WantedBy"},
}


def read(unit: Path) -> dict[str, dict[str, list[str]]]:
    """Returns what a unit says: its values by section and key."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in unit.read_text().splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(header[1], {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_it_has_known_keys_alone(unit: Path) -> None:
    said = read(unit)
    assert said.keys() == KEYS.keys()
    assert {section: keys.keys() - KEYS[section] for section, keys in said.items()} == {
        section: set() for section in KEYS
    }


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for one in UNITS:  # they name each other
        (tmp_path / one.name).write_text(one.read_text().replace(KVLOOM, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_its_command_has_options_that_there_are(unit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = read(unit)["Service"]["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program == KVLOOM
    assert main([*arguments[: 2 if arguments[0] == "cluster" else 1], "--help"]) == 0
    told = capsys.readouterr().out
    for option in (word for word in arguments if word.startswith("--")):
        assert option in told


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_it_runs_as_a_user_whose_home_is_the_service_s(unit: Path) -> None:
    """Kernels that are compiled, and what comes from the hub, are kept there."""
    service = read(unit)["Service"]
    assert service["User"] == ["kvloom"]
    assert service["Environment"] == ["HOME=/var/lib/kvloom"]
    assert service.get("StateDirectory") == ["kvloom"]


def test_production_md_installs_what_the_unit_starts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "production.md").read_text("utf-8")
    folder = KVLOOM.removesuffix("/bin/kvloom")
    assert f"python3 -m venv {folder}\n" in page
    assert f"{folder}/bin/pip install " in page
    assert "deploy/systemd/kvloom.service /etc/systemd/system/" in page
    assert "/etc/kvloom/fleet.yaml" in page


@pytest.mark.parametrize("name", ["kvloom-head", "kvloom-node"])
def test_keepers_and_engines_outlive_ray(name: str) -> None:
    [unit] = [one for one in UNITS if one.stem == name]
    service = read(unit)["Service"]
    assert service["KillMode"] == ["process"]
    assert service["OOMPolicy"] == ["continue"]
    assert service["Restart"] == ["always"]
    assert service["Type"] == ["notify"]
    assert "--block" in service["ExecStart"][0]
