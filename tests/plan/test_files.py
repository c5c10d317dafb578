"""Plan files, how `kvloom serve` takes them, and the bytes that a plan counts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvloom.config.config import DEMO
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.lab.sim.unit import planned_units
from kvloom.plan.cluster import CPU, Nodes
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import (
    PlacementPlan,
    PlannedModel,
    PlannedUnit,
    activation_bytes,
    fixed_bytes,
    is_plan,
    pool_bytes,
    read_plan,
    request_bytes,
    token_bytes,
    usable_bytes,
    write_plan,
)
from kvloom.plan.planner import make_plan
from kvloom.types.errors import ConfigError
from tests.plan.clusters import check_plan, demand, muxserve, nodes, roofline

MACHINE = Machine(cores=4, memory=3 << 30, name="here")
PLAN = make_plan([nodes("A100-80", 8)], muxserve(0.9, 5.0)[::4], roofline)


def model(name: str, path: str | None, **changes: Any) -> PlannedModel:
    known = PLAN.units[0].models[0]
    changes = {"rate": 2.0, "prefill_share": 0.75, "decode_share": 0.5, "quota": 0.5} | changes
    return replace(known, name=name, path=path, **changes)


def unit(name: str, *models: PlannedModel, **changes: Any) -> PlannedUnit:
    fields: dict[str, Any] = {"node": "", "device": "cpu", "gpus": 2, "kv_bytes": 1 << 26} | changes
    return PlannedUnit(name=name, models=models, **fields)


def local_plan() -> PlacementPlan:
    guide, sums = str(DEMO / "guide"), str(DEMO / "sums")
    units = (
        unit("unit-0", model("guide", guide), model("sums", sums, rate=0.0, quota=0.25)),
        unit("unit-1", model("guide", guide, quota=1.0), gpus=1, kv_bytes=1 << 25),
    )
    return PlacementPlan(units=units, throughput=4.0, made_by="a test")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    check_plan(PLAN)
    write_plan(file, PLAN)
    assert read_plan(file) == PLAN
    assert is_plan(file)
    with pytest.raises(ConfigError, match="a path that can be written"):
        write_plan(tmp_path / "nowhere" / "plan.json", PLAN)


def changed(**changes: Any) -> bytes:
    return json.dumps({**msgspec.to_builtins(PLAN), **changes}).encode()


def test_a_config_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps({"models": {"a": str(DEMO / "guide")}, "units": [{"models": ["a"]}]}))
    assert not is_plan(file)
    assert not is_plan(tmp_path / "nowhere.json")
    assert load_config(file, {}, {}, MACHINE).engines[0].models[0].name == "a"


def test_units_of_a_plan_become_the_fleets(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, local_plan())
    config = load_config(file, {"port": 9000}, {}, MACHINE)
    first, second = config.engines
    assert config.port == 9000
    assert (first.unit, first.kv_bytes, first.threads) == ("unit-0", 1 << 26, 2)
    assert (second.unit, second.kv_bytes, second.threads) == ("unit-1", 1 << 25, 1)
    guide, sums = first.models
    assert (guide.name, guide.path, guide.rate) == ("guide", str(DEMO / "guide"), 2.0)
    assert (guide.prefill_share, guide.decode_share, guide.quota) == (0.75, 0.5, 0.5)
    assert (sums.name, sums.quota) == ("sums", 0.25)
    assert 0 < sums.rate < 1e-3
    assert [(one.name, one.quota) for one in second.models] == [("guide", 1.0)]


@pytest.mark.parametrize(
    ("units", "part"),
    [
        (
            (unit("a", model("m", str(DEMO / "guide")), device="H100", gpus=1, index=3),),
            "units.0.device: there is no cuda:3 here, but no GPUs; a machine that has it, or `device: cpu`",
        ),
        (
            (
                unit(
                    "a",
                    model("m", "x/y", prefill_share=1.0, decode_share=1.0),
                    device="H100",
                    kv_bytes=1 << 40,
                    tensor_parallel=2,
                ),
            ),
            "units.0.device: there is no cuda:0 to cuda:1 here, but no GPUs",
        ),
        ((unit("a", model("m", None)),), "a: no path of 'm'; plan with `path` for each model"),
        (
            (unit("a", model("m", "x/y")), unit("b", model("m", "x/y"), node="node-1")),
            "units.1.node: 'node-1', and this machine is 'here'; without --cluster units are served on this",
        ),
        ((unit("a", model("m", "x/y"), gpus=9),), "units.0.threads: 9 of 4 cores"),
        (
            (unit("a", model("m", "x/y"), kv_bytes=1 << 40),),
            "units.0.kv_memory: 1 TiB is more than the 3 GiB",
        ),
        ((unit("a", model("m", "./nowhere")),), "models.m.path: "),
    ],
)
def test_plans_that_cannot_be_served_here(tmp_path: Path, units: tuple[PlannedUnit, ...], part: str) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, PlacementPlan(units=units, throughput=1.0, made_by="a test"))
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, {}, MACHINE)
    assert error.value.message.startswith(f"{file}: ")
    assert part in error.value.message


def _unit(**changes: Any) -> bytes:
    first, *others = msgspec.to_builtins(PLAN)["units"]
    return changed(units=[first | changes, *others])


TWICE = [msgspec.to_builtins(PLAN.units[0]) | {"name": f"unit-{n}"} for n in (0, 1)]


def _model(**changes: Any) -> bytes:
    first, *others = msgspec.to_builtins(PLAN)["units"][0]["models"]
    return _unit(models=[first | changes, *others])


def _shape(**changes: Any) -> bytes:
    return _model(shape=msgspec.to_builtins(PLAN.units[0].models[0].shape) | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no plan"),
        (msgspec.json.encode(PLAN)[:-200], "no plan"),
        (b"\xff\xfe", "no plan"),
        (b"{}", "missing required field `version`"),
        (changed(version=1), "a plan of version 1; this kvloom reads version 2, which its own `kvloom plan`"),
        (changed(units=[]), "units with names of their own"),
        (changed(units=[msgspec.to_builtins(PLAN.units[0])] * 2), "units with names of their own"),
        (_unit(models=[]), "and with models"),
        (_unit(gpus=0), "$.units[0].gpus"),
        (_unit(gpus=10**9), "gpus"),
        (_unit(index=-1), "index"),
        (_unit(tensor_parallel=1), "unit-0: tensor_parallel 1 for 4 × A100-80; 4 is right"),
        (_unit(gpus=3, tensor_parallel=3), "unit-0: 3 ranks cannot share the 32 KV heads of "),
        (_model(prefill_share=0.5), "unit-0: shares of the compute for "),
        (_unit(device="cpu", gpus=2, tensor_parallel=3), "unit-0: 3 ranks for 2 cores; a core for each"),
        (_unit(device="cpu", index=1), "unit-0: index 1; cores have no number"),
        (changed(units=TWICE), "unit-1: cuda:0 is unit-0's too; GPUs of its own are right"),
        (_unit(kv_bytes=-5), "kv_bytes"),
        (_unit(kv_bytes=10**18), "kv_bytes"),
        (_unit(name=""), "name"),
        (_unit(colour="red"), "colour"),
        (_unit(models=[msgspec.to_builtins(PLAN.units[0].models[0])] * 2), "two models of one name"),
        (_model(name="a\nb"), "name"),
        (_model(prompt=-3.0), "prompt"),
        (_shape(itemsize=3), "itemsize"),
        (_shape(layers=10**7), "layers"),
        (_shape(kv_heads=4096), "KV heads"),
        (_shape(active=9), "experts"),
    ],
)
def test_a_file_that_is_no_plan_is_told_in_one_line(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        read_plan(file)
    assert error.value.message.startswith(f"{file}: ")
    assert said in error.value.message
    assert "\n" not in error.value.message


def test_a_pool_that_holds_no_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(_unit(kv_bytes=1))
    with pytest.raises(ConfigError, match="hold no page of"):
        planned_units(read_plan(file))


ONE, FOUR, EIGHT = (nodes("A100-80", 8).mesh(n) for n in (1, 4, 8))


def test_k_and_v_of_a_token() -> None:
    assert [token_bytes(find_shape(f"llama-{size}"), ONE) for size in ("7b", "13b", "30b", "65b")] == [
        524_288,
        819_200,
        1_597_440,
        2_621_440,
    ]
    assert request_bytes(demand("a", "llama-7b", 1.0, 161, 338), ONE) == 499 * 524_288 + 1


def test_more_devices_than_kv_heads_keep_copies() -> None:
    shape = find_shape("llama3-8b")  # 8 KV heads
    assert [token_bytes(shape, kind) for kind in (ONE, FOUR, EIGHT)] == [131_072] * 3
    sixteen = nodes("A100-80", 16).mesh(16)
    assert token_bytes(shape, sixteen) == 2 * 131_072
    assert token_bytes(shape, Nodes(CPU, 1 << 30, 16, 1).mesh(16)) == 131_072


def test_the_pool_is_what_weights_and_activations_leave() -> None:
    seven, thirteen = find_shape("llama-7b"), find_shape("llama-13b")
    left = pool_bytes(FOUR, [seven, thirteen])
    assert left == usable_bytes(FOUR) - fixed_bytes(seven, FOUR) - fixed_bytes(thirteen, FOUR)
    assert usable_bytes(FOUR) == 304 * 10**9
    assert fixed_bytes(seven, FOUR) == seven.weight_bytes + activation_bytes(seven, FOUR)
    assert pool_bytes(ONE, [find_shape("llama-65b")]) < 0


@pytest.mark.parametrize("size", ["7b", "13b", "30b", "65b"])
def test_activations_are_little_and_grow_with_copies(size: str) -> None:
    shape = find_shape(f"llama-{size}")
    assert 0 < activation_bytes(shape, ONE) < activation_bytes(shape, EIGHT) < 0.1 * shape.weight_bytes
