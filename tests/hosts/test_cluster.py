"""`kvloom serve --cluster` over hosts of a Ray cluster that `kvloom cluster` has made."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from kvloom.config.config import DEMO
from tests.hosts.hosts import Host, HostProcess, NoHosts, eventually, hosts

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
DEADLINE = 120.0
CONFIG = """\
host: 0.0.0.0
kv_memory: 48MiB
node_lease: 5s
models: {{sums: {demo}/sums}}
units: [{{models: [sums], replicas: 3, threads: 1}}]
"""
CHAT = {
    "model": "sums",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
}


def kvloom(host: Host, *arguments: str, token: str = "") -> str:
    """Runs a command at a host, and returns what it prints. Raises CalledProcessError."""
    environment = [f"RAY_AUTH_TOKEN={token}"] if token else []
    return host.run("env", *environment, sys.executable, "-m", "kvloom.cli", *arguments, seconds=DEADLINE)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    """Hosts of one cluster, the head first."""
    try:
        with hosts(3) as made:
            head, *others = made
            told = kvloom(head, "cluster", "start", "--head", "--address", head.address)
            [token] = re.findall(rf"RAY_AUTH_TOKEN=(\w+) kvloom cluster join {head.address}:6379", told)
            for host in others:
                kvloom(host, "cluster", "join", f"{head.address}:6379", token=token)
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


@dataclass
class Serving:
    """A fleet that serves from the head."""

    process: HostProcess
    url: str
    printed: list[str] = field(default_factory=list)

    def read(self) -> None:
        for line in self.process.stdout:
            self.printed.append(line.decode())

    def end(self) -> None:
        self.process.signal(signal.SIGINT)
        assert self.process.wait(DEADLINE) == 0, "".join(self.printed)


@contextmanager
def serving(three: list[Host], folder: Path, more: str = "") -> Iterator[Serving]:
    """more: further lines of the config."""
    config = folder / "fleet.yaml"
    config.write_text(CONFIG.format(demo=DEMO) + more)
    with served(three[0], str(config)) as made:
        yield made


@contextmanager
def served(head: Host, *arguments: str) -> Iterator[Serving]:
    """Serves over the cluster of a host, from there."""
    process = head.start(sys.executable, "-m", "kvloom.cli", "serve", *arguments, "--cluster", "auto")
    made = Serving(process, f"http://{head.address}:8000")
    reading = threading.Thread(target=made.read)
    reading.start()
    try:
        eventually(lambda: any("Ready in" in line for line in made.printed), seconds=DEADLINE)
        yield made
    finally:
        process.signal(signal.SIGINT)
        process.wait(DEADLINE)
        reading.join()


def of_kvloom(host: Host) -> list[str]:
    """Returns what of kvloom runs at a host."""
    lines = []
    for pid in host.processes():
        line = command_of(pid)
        if re.search(r"kvloom|NodeAgent", line):
            lines.append(line)
    return lines


def command_of(pid: int) -> str:
    """Returns a process's command; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


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
    assert line == "data: [DONE]" or not line
    return "".join(pieces)


def test_a_node_that_lacks_a_checkpoint_is_named_before_anything_starts(
    three: list[Host], tmp_path: Path
) -> None:
    shutil.copytree(f"{DEMO}/sums", tmp_path / "sums")
    three[1].run("mount", "-t", "tmpfs", "none", str(tmp_path))  # there it is another folder, and empty
    try:
        said = refused(three[0], "serve", "--model", f"m={tmp_path}/sums", "--cluster", "auto")
    finally:
        three[1].run("umount", str(tmp_path))
    lacking = f"models.m: node {three[1].address} has no folder {tmp_path}/sums"
    assert lacking in said


def test_a_node_with_a_gateway_that_lacks_the_keys_is_named_before_anything_starts(
    three: list[Host], tmp_path: Path
) -> None:
    (tmp_path / "keys.yaml").write_text("{}")
    config = Path(tempfile.mkdtemp(dir=tmp_path.parent)) / "fleet.yaml"
    more = f"gateways: [{three[1].address}]\nkeys: {tmp_path}/keys.yaml\n"
    config.write_text(CONFIG.format(demo=DEMO) + more)
    three[1].run("mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        said = refused(three[0], "serve", str(config), "--cluster", "auto")
    finally:
        three[1].run("umount", str(tmp_path))
    assert f"keys: node {three[1].address} has no {tmp_path}/keys.yaml; the same path on each" in said


def test_gateways_on_two_hosts(three: list[Host], tmp_path: Path) -> None:
    """Each answers, and the one that is killed is replaced on its host."""
    urls = [f"http://{host.address}:8000" for host in three[:2]]
    more = f"gateways: [{three[0].address}, {three[1].address}]\n"
    with serving(three, tmp_path, more) as fleet:
        assert text_of(urls[0]) == (right := text_of(urls[1]))
        [gateway] = [pid for pid in three[1].processes() if "gateway@" in command_of(pid)]
        os.kill(gateway, signal.SIGKILL)
        eventually(lambda: any("was killed by SIGKILL" in line for line in fleet.printed), seconds=DEADLINE)
        assert text_of(urls[1]) == right
        assert not any("gateway@" in line for line in of_kvloom(three[2]))
    eventually(lambda: not any(map(of_kvloom, three)), seconds=DEADLINE)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ("nonsense", "no address; HOST:PORT of a cluster's head, as 10.0.0.1:6379, is right"),
        ("127.0.0.1:9", "cannot be reached (Connection refused)"),
    ],
)
def test_a_cluster_that_cannot_be_reached(three: list[Host], cluster: str, problem: str) -> None:
    assert problem in refused(three[0], "serve", "--cluster", cluster)


def test_a_host_with_another_token_does_not_join(three: list[Host]) -> None:
    head = f"{three[0].address}:6379"
    said = refused(three[2], "cluster", "join", head, token="0" * 64)
    assert said.startswith("kvloom: Ray cannot start here: ")


def refused(host: Host, *arguments: str, token: str = "") -> str:
    """Returns the one line with which a command ends that cannot do what it is told."""
    with pytest.raises(subprocess.CalledProcessError) as ended:
        kvloom(host, *arguments, token=token)
    [line] = [line for line in str(ended.value.stderr).splitlines() if line.startswith("kvloom: ")]
    return line


def units_of(host: Host) -> list[str]:
    """Returns the units whose engines run at a host."""
    return [unit for line in of_kvloom(host) for unit in re.findall(r"\bunit-\d+", line)]


def test_a_host_is_cut_off_for_longer_than_its_lease(three: list[Host], tmp_path: Path) -> None:
    """Its streams go on elsewhere, and so does its unit, once nothing there can answer any more; when it is
    back, no unit has two processes."""
    with serving(three, tmp_path) as fleet:
        right = text_of(fleet.url)
        [cut] = units_of(three[1])
        with asking(fleet.url, 6) as found:
            three[1].cut_off()
        try:
            assert found == [right] * 6
            eventually(lambda: cut in units_of(three[0]) + units_of(three[2]), seconds=DEADLINE)
            assert not units_of(three[1]), "two processes of a unit"
        finally:
            three[1].join_again()
        eventually(lambda: kvloom(three[0], "unit", "list").count(" up ") == 3, seconds=DEADLINE)
        units = [unit for host in three for unit in units_of(host)]
        assert sorted(units) == ["unit-0", "unit-1", "unit-2"]
        assert text_of(fleet.url) == right
    eventually(lambda: not any(map(of_kvloom, three)), seconds=DEADLINE)


@contextmanager
def asking(url: str, count: int) -> Iterator[list[str]]:
    """Asks for so many streams at the same time. Their texts are in the list when the block has ended."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(text_of(url)), daemon=True) for _ in range(count)]
    for one in threads:
        one.start()
    yield found
    for one in threads:
        one.join(DEADLINE)


def test_a_host_s_power_is_cut_under_streams(three: list[Host], tmp_path: Path) -> None:
    """Its streams go on elsewhere with the same tokens, its unit starts elsewhere once the lease is over, and
    a clean end leaves nothing anywhere."""
    with serving(three, tmp_path) as fleet:
        assert [len(units_of(host)) for host in three] == [1, 1, 1]
        right = text_of(fleet.url)
        with asking(fleet.url, 6) as found:
            three[2].cut_power()
        assert found == [right] * 6
        eventually(lambda: kvloom(three[0], "unit", "list").count(" up ") == 3, seconds=DEADLINE)
    eventually(lambda: not of_kvloom(three[0]) and not of_kvloom(three[1]), seconds=DEADLINE)
