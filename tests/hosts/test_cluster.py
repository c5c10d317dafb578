"""What `kvloom serve --cluster` and `kvloom cluster` refuse, over hosts of a Ray cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.fleets import RayCluster, kvloom, refused
from tests.hosts.hosts import Host

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    """Hosts of one cluster, the head first."""
    with hosts_or_skip(3) as made:
        RayCluster(made).start()
        yield made


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
    config.write_text(f"models: {{sums: {DEMO}/sums}}\n{more}")
    three[1].run("mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        said = refused(three[0], "serve", str(config), "--cluster", "auto")
    finally:
        three[1].run("umount", str(tmp_path))
    assert f"keys: node {three[1].address} has no {tmp_path}/keys.yaml; the same path on each" in said


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ("nonsense", "no address; HOST:PORT of a cluster's head, as 10.0.0.1:6379, is right"),
        ("127.0.0.1:9", "cannot be reached (Connection refused)"),
    ],
)
def test_a_cluster_that_cannot_be_reached(three: list[Host], cluster: str, problem: str) -> None:
    assert problem in refused(three[0], "serve", "--cluster", cluster)


def test_a_host_joins_one_cluster_once(three: list[Host]) -> None:
    said = refused(three[2], "cluster", "join", f"{three[0].address}:6379")
    assert f"this host, {three[2].address}, is in a cluster already" in said


def test_a_host_with_another_token_does_not_join(three: list[Host]) -> None:
    head = f"{three[0].address}:6379"
    kvloom(three[2], "cluster", "stop")
    said = refused(three[2], "cluster", "join", head, token="0" * 64)
    assert said.startswith("kvloom: Ray cannot start here: ")
