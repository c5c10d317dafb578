"""The recipe for Kubernetes, by the schemas of Kubernetes and of a RayCluster. No operator has run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.types.errors import ConfigError

RECIPE = (Path(__file__).parents[2] / "deploy" / "kuberay" / "kvloom.yaml").read_text()
SCHEMA = json.loads(Path(__file__).with_name("raycluster.json").read_text())
KUBERNETES = "1.37"


def documents(text: str = RECIPE) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods() -> list[dict[str, Any]]:
    """Returns the templates of the head's pod and of the others."""
    spec = documents()["RayCluster"]["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def containers() -> Iterator[dict[str, Any]]:
    for pod in pods():
        yield from pod["spec"]["containers"]


@pytest.mark.parametrize("kind", ["ConfigMap", "Service"])
def test_kubernetes_knows_its_objects(kind: str) -> None:
    kubernetes_validate.validate(documents()[kind], KUBERNETES, strict=True)


@pytest.mark.parametrize("number", [0, 1])
def test_kubernetes_knows_its_pods(number: int) -> None:
    metadata = {"name": "pod"}
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": pods()[number]}
    kubernetes_validate.validate(template, KUBERNETES, strict=True)


def test_kuberay_knows_its_cluster() -> None:
    jsonschema.validate(documents()["RayCluster"], SCHEMA)


def test_both_ways_to_keep_the_head_s_state_are_known() -> None:
    """They stand there as comments, each beginning with the same key."""
    blocks = re.findall(r"^  # gcsFaultToleranceOptions:\n(?:^  #   .*\n)+", RECIPE, re.M)
    assert len(blocks) == 2
    for block in blocks:
        spoken = RECIPE.replace(block, re.sub(r"^  # ", "  ", block, flags=re.M))
        cluster = documents(spoken)["RayCluster"]
        jsonschema.validate(cluster, SCHEMA)
        assert cluster["spec"]["gcsFaultToleranceOptions"]


def test_what_it_does_not_know_is_refused() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    cluster = documents()["RayCluster"]
    cluster["spec"]["headGroupSpecs"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, SCHEMA)


def test_all_of_ray_needs_the_token() -> None:
    for container in containers():
        given = {one["name"]: one for one in container["env"]}
        assert given["RAY_AUTH_MODE"]["value"] == "token"
        reference = given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "kvloom-token", "key": "auth_token"}


def test_each_pod_has_its_resources_its_address_and_the_checkpoints_at_one_path() -> None:
    spec = documents()["RayCluster"]["spec"]
    assert spec["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["rayStartParams"]["node-ip-address"] == "$POD_IP"
    for container in containers():
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.items() >= {"models": "/models", "temporary": "/tmp", "memory": "/dev/shm"}.items()


def test_the_service_finds_the_pod_with_the_gateway() -> None:
    service = documents()["Service"]["spec"]
    assert service["selector"].items() <= pods()[0]["metadata"]["labels"].items()
    [serving] = [one for one in pods()[0]["spec"]["containers"] if one["name"] == "kvloom"]
    [port] = serving["ports"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert "kvloom serve /etc/kvloom/fleet.yaml --cluster auto" in serving["args"][0]


def test_the_fleet_is_one(tmp_path: Path) -> None:
    """Its models are not here, which is all that is wrong."""
    (tmp_path / "fleet.yaml").write_text(documents()["ConfigMap"]["data"]["fleet.yaml"])
    with pytest.raises(ConfigError, match=r"models\.(chat|code).*/models/(chat|code)"):
        load_config(tmp_path / "fleet.yaml", {}, {}, Machine(cores=64, memory=1 << 40, gpus=0))
