"""`kvloom doctor`, and what it says of a machine that lacks something."""

from __future__ import annotations

import json
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvloom.cli.doctor import hardware, software
from kvloom.cli.doctor.software import Processor
from kvloom.config.config import Config
from kvloom.config.machine import Machine
from kvloom.types.numbers import show_size
from tests.commands import kvloom

HERE = Machine(cores=8, memory=1 << 34)
PLAIN = Processor(torch="2.13", cuda=None, onednn=True, threads=8, features=["AVX2"], gpus=[])


def test_this_machine_can_serve() -> None:
    done = kvloom("doctor", "--json")
    assert done.stderr == ""
    found = {one["what"]: one for one in json.loads(done.stdout)}
    problems = [one for one in found.values() if one["verdict"] == "problem"]
    assert done.returncode == bool(problems)
    assert found["Python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["torch"]["verdict"] != "problem"
    assert {"cores", "memory", "open files", "GPUs", "C compiler", "extra otlp"} <= found.keys()


def test_a_problem_is_a_line_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PROCESSOR", "kvloom.no_such_module")
    done = kvloom("doctor")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert any("torch" in line and "no_such_module" in line for line in lines)


def test_gpus_that_torch_cannot_use() -> None:
    machine = Machine(cores=8, memory=1 << 34, gpus=2)
    found = hardware.check_gpus(machine, PLAIN)
    assert (found.verdict, "torch can use 0" in found.found) == ("problem", True)
    torch, instructions = software.check_torch(PLAIN, machine.gpus)
    assert (torch.verdict, instructions.verdict) == ("note", "note")
    assert hardware.check_gpus(HERE, PLAIN).verdict == "ok"


def test_a_cgroup_that_allows_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 32}\n")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    cores = next(hardware.check_cores(Machine(cores=8, memory=1 << 34, quota=2.5)))
    assert "allows the time of 2.5, and `threads: auto` takes 2" in cores.found
    assert "time of" not in next(hardware.check_cores(Machine(cores=8, memory=1 << 34, quota=16.0))).found
    assert f"the cgroup allows {show_size(1 << 32)}" in next(hardware.check_memory(HERE)).found
    assert next(hardware.check_memory(Machine(cores=8, memory=1 << 20))).verdict == "problem"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(Config.model_fields["port"], "default", port)
        found = hardware.check_port()
    assert (found.what, found.verdict) == (f"port {port}", "note")
    assert found.found == "address already in use at 127.0.0.1"


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    assert next(iter(software.check_triton(0))).verdict == "note"
    found = next(iter(software.check_triton(1)))
    assert (found.verdict, found.found) == ("problem", "CC names /no/such/cc, which cannot be run")


def test_what_to_install_is_what_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvloom is not on PyPI: whatever has its name there is somebody else's."""
    wanted = ["no-such-package", "no-such-extra; extra == 'gpu'"]
    monkeypatch.setattr(metadata, "requires", {"kvloom": wanted}.get)
    packages, *extras = software.check_packages()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert packages.verdict == "problem"
    assert packages.right == "`pip install .` in kvloom's checkout brings them"
    assert "\npip install .\n" in readme
    gpu = next(one for one in extras if one.what == "extra gpu")
    assert gpu.right == "for GPUs: `pip install '.[gpu]'` in kvloom's checkout"
    assert "pip install '.[cluster]'" in readme
