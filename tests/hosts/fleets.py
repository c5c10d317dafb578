"""A Ray cluster over hosts, made by `kvloom cluster`, and a fleet that `kvloom serve --cluster` runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.hosts.hosts import Host, HostProcess, eventually

DEADLINE: Final = 120.0
PORT: Final = 6379
GATEWAY_PORT: Final = 8000
_ALIVE: Final = """
import ray
ray.init("auto", log_to_driver=False, configure_logging=False)
print(*(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
"""
CHAT: Final = {
    "model": "sums",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
}
ADMIN: Final = "k-admin-of-the-hosts"
KINDS: Final = {
    "agent": r"^ray::NodeAgent",
    "raylet": r"/raylet/raylet ",
    "gcs": r"/gcs/gcs_server ",
    "keeper": r"kvloom\.serve\.nodes\.keeper_process",
    "engine": r"\bunit-\d+",
    "gateway": r"kvloom\.serve\.gateway_process",
    "controller": r"kvloom\.serve\.\S*controller",
}
"""How the processes of each kind are told from others, by their command lines."""


def kvloom(host: Host, *arguments: str, token: str = "", seconds: float = DEADLINE) -> str:
    """Runs a command at a host, and returns what it prints. Raises CalledProcessError."""
    environment = [f"KVLOOM_ADMIN_KEY={ADMIN}", *([f"RAY_AUTH_TOKEN={token}"] if token else [])]
    command = ("env", *environment, sys.executable, "-m", "kvloom.cli", *arguments)
    try:
        return host.run(*command, seconds=seconds)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise


def refused(host: Host, *arguments: str, token: str = "") -> str:
    """Returns the one line with which a command ends that cannot do what it is told."""
    with pytest.raises(subprocess.CalledProcessError) as ended:
        kvloom(host, *arguments, token=token)
    [line] = [line for line in str(ended.value.stderr).splitlines() if line.startswith("kvloom: ")]
    return line


def text_of(url: str, model: str = "sums") -> str:
    """Returns the whole text of a streamed chat."""
    pieces = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=CHAT | {"model": model, "stream": True}, timeout=DEADLINE
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                pieces += [choice["delta"].get("content", "") for choice in event["choices"]]
    return "".join(pieces)


def commands(host: Host) -> dict[int, str]:
    """Returns the command lines of what runs at a host, by process."""
    found = {}
    for pid in host.processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line:  # else it has ended, and nobody has asked how
            found[pid] = line
    return found


def of_kvloom(host: Host) -> list[str]:
    """Returns what of kvloom runs at a host."""
    return [line for line in commands(host).values() if re.search(r"kvloom|NodeAgent", line)]


def units_of(host: Host) -> list[str]:
    """Returns the units whose engines run at a host."""
    return [unit for line in of_kvloom(host) for unit in re.findall(r"\bunit-\d+", line)]


def of_kind(host: Host, kind: str) -> list[int]:
    """Returns a host's processes of one of `KINDS`."""
    return [pid for pid, line in commands(host).items() if re.search(KINDS[kind], line)]


@dataclass
class RayCluster:
    """Hosts of one Ray cluster."""

    hosts: list[Host]
    """The head first."""
    token: str = ""
    storage: Path | None = None
    """Where the head keeps what Ray knows."""

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def workers(self) -> list[Host]:
        return self.hosts[1:]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def start(self) -> None:
        """Makes the cluster."""
        kept = () if self.storage is None else ("--storage", str(self.storage))
        told = kvloom(self.head, "cluster", "start", "--head", "--address", self.head.address, *kept)
        [self.token] = re.findall(rf"RAY_AUTH_TOKEN=(\w+) kvloom cluster join {self.address}", told)
        for host in self.workers:
            self.join(host)

    def start_head_again(self) -> None:
        """Starts the head with what it has kept. The others wait for it."""
        assert self.storage is not None
        self.head.run(sys.executable, "-m", "ray.scripts.scripts", "stop")
        kept = ("--address", self.head.address, "--storage", str(self.storage))
        kvloom(self.head, "cluster", "start", "--head", *kept, token=self.token)

    def join(self, host: Host) -> None:
        kvloom(host, "cluster", "join", self.address, token=self.token)

    def alive(self) -> list[str]:
        """Returns the addresses of the hosts that Ray takes to be alive."""
        return self.head.run("env", "RAY_AUTH_MODE=token", sys.executable, "-c", _ALIVE).split()

    def stop(self) -> None:
        """Takes each host out of the cluster, the head last."""
        for host in reversed(self.hosts):
            kvloom(host, "cluster", "stop")


@dataclass
class Served:
    """A `kvloom serve`."""

    host: Host
    arguments: Sequence[str]
    printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts the command, and waits until it says that the fleet is ready."""
        self.process = self.host.start(sys.executable, "-m", "kvloom.cli", "serve", *self.arguments)
        self._reading = threading.Thread(target=self._read, args=[self.process], daemon=True)
        before = self.readies
        self._reading.start()
        eventually(lambda: self.readies > before, seconds=DEADLINE)

    @property
    def readies(self) -> int:
        """Returns how often it has said that the fleet is ready."""
        return sum("Ready in" in line for line in self.printed)

    def _read(self, process: HostProcess) -> None:
        for line in process.stdout:
            self.printed.append(line.decode())

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{GATEWAY_PORT}"

    def end(self) -> int:
        """Ends it as Ctrl-C does, and returns its exit code."""
        self.process.signal(signal.SIGINT)
        code = self.process.wait(DEADLINE)
        self._reading.join()
        return code


@contextmanager
def served(host: Host, *arguments: str) -> Iterator[Served]:
    """Yields a `kvloom serve`, which is ended at last."""
    made = Served(host, arguments)
    try:
        yield made
    finally:
        made.end()


@dataclass
class Serving:
    """A fleet over a cluster's hosts."""

    cluster: RayCluster
    shown: Served
    """By `kvloom serve`, on the head."""

    @property
    def url(self) -> str:
        return self.shown.url

    @property
    def urls(self) -> list[str]:
        """Returns the addresses of all its gateways."""
        homes = [host for host in self.cluster.hosts if of_kind(host, "gateway")]
        return [f"http://{host.address}:{GATEWAY_PORT}" for host in homes]

    def admin(self, path: str, body: object = None) -> object:
        """Asks one of the paths for administrators."""
        method = "GET" if body is None else "POST"
        headers = {"authorization": f"Bearer {ADMIN}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=DEADLINE)
        answer.raise_for_status()
        return answer.json()

    def units(self) -> dict[str, str]:
        """Returns the phase of each unit."""
        found = self.admin("/admin/units")
        assert isinstance(found, list)
        return {unit["name"]: unit["state"] for unit in found}

    def nodes(self) -> dict[str, str]:
        """Returns the phase of each node."""
        found = self.admin("/admin/nodes")
        assert isinstance(found, list)
        return {node["name"]: node["state"] for node in found}

    def whole(self) -> bool:
        """Returns whether all units are up, each with one process, and all nodes there."""
        there = sorted(unit for host in self.cluster.hosts for unit in units_of(host))
        try:
            units, nodes = self.units(), self.nodes()
        except httpx.TransportError:
            return False
        return (
            set(units.values()) == {"up"}
            and there == sorted(units)
            and len(nodes) == len(self.cluster.hosts)
            and set(nodes.values()) == {"there"}
        )

    def become_whole(self) -> None:
        """Waits until the fleet is whole. Raises AssertionError."""
        try:
            eventually(self.whole, DEADLINE)
        except AssertionError as error:
            raise AssertionError(
                f"the fleet did not become whole: {self.units()}, {self.nodes()}, "
                f"{[units_of(host) for host in self.cluster.hosts]}\n{''.join(self.shown.printed[-30:])}"
            ) from error

    def leaked(self) -> dict[str, int]:
        """Drops all that is cached, and returns how many blocks each unit holds all the same, if any."""
        try:
            return self._leaked()
        except httpx.HTTPStatusError as error:  # A gateway asks a unit anew after it has heard of it anew.
            return {str(error): 0}

    def _leaked(self) -> dict[str, int]:
        leaked = {}
        for unit in self.units():
            load = self.admin(f"/verbs/{unit}/load")
            assert isinstance(load, dict)
            for model in load["models"]:
                self.admin(f"/verbs/{unit}/evict", {"model": model, "prompt": []})
            load = self.admin(f"/verbs/{unit}/load")
            assert isinstance(load, dict)
            if used := load["total_blocks"] - load["free_blocks"]:
                leaked[unit] = used
        return leaked

    def end(self) -> None:
        """Ends the fleet as Ctrl-C does."""
        assert self.shown.end() == 0, "".join(self.shown.printed)


@contextmanager
def serving(cluster: RayCluster, config: str, folder: Path) -> Iterator[Serving]:
    """Serves with a config, of which the text is given, until the block ends or `Serving.end` is called.
    folder: for files."""
    path, admins = folder / "fleet.yaml", folder / "admins"
    admins.write_text(ADMIN + "\n")
    path.write_text(f"{config}host: 0.0.0.0\nadmin_key_file: {admins}\n")
    with served(cluster.head, str(path), "--cluster", "auto") as made:
        yield Serving(cluster, made)


@contextmanager
def lone(host: Host, *arguments: str) -> Iterator[str]:
    """Lets one engine at a host serve what the arguments of `kvloom serve` say, and yields its address."""
    with served(host, *arguments, "--host", "0.0.0.0") as made:
        yield made.url


def files_of(hosts: Sequence[Host]) -> list[str]:
    """Returns what lies in the hosts' home folders and folders for temporary files, Ray's own left out."""
    left = []
    for host in hosts:
        for path in host.folder.rglob("*"):
            name = path.relative_to(host.folder)
            if name.parts[0] not in ("ray", ".ray") and not path.is_dir():
                left.append(f"{host.folder.name}/{name}")
    return left
