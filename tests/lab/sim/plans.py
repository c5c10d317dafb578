"""Small plans and workloads, as files for `kvloom simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from kvloom.plan.cost.profile import CpuOverhead, write_profile
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit, write_plan
from tests.plan.cost.profiles import make_profile

SHAPE = ModelShape(layers=2, hidden=512, heads=4, kv_heads=2, head_dim=128, ffn=1024, vocab=500)


def planned_model(name: str) -> PlannedModel:
    return PlannedModel(
        name=name,
        path=None,
        shape=SHAPE,
        rate=10.0,
        prompt=30.0,
        output=8.0,
        prefill_share=1.0,
        decode_share=0.5,
        quota=0.5,
        throughput=10.0,
    )


def make_plan(
    units: int = 2, models: Sequence[str] = ("a", "b"), device: str = "A10", *, gpus: int = 1
) -> PlacementPlan:
    """Every model on every unit of so many devices; jobs of several take turns."""
    return PlacementPlan(
        units=tuple(
            PlannedUnit(
                name=f"unit-{i}",
                node="node-0",
                device=device,
                gpus=gpus,
                index=0 if device == "cpu" else i * gpus,
                tensor_parallel=1 if device == "cpu" else gpus,
                kv_bytes=64 << 20,
                models=tuple(
                    planned_model(name) if gpus == 1 else replace(planned_model(name), decode_share=1.0)
                    for name in models
                ),
            )
            for i in range(units)
        ),
        throughput=20.0,
        made_by="a test",
    )


OVERHEADS = (
    CpuOverhead(role="client", request=0.004, prompt=0.0, token=0.0, turn=0.0),
    CpuOverhead(role="gateway", request=0.002, prompt=0.0, token=0.001, turn=0.0),
)

SPEC = """\
name: small
seed: 3
requests: 40
rate: 400
models: [a, b]
lengths: {prompt: [4, 60], output: [2, 40]}
system: {tokens: 24}
"""

CONFIG = """\
threads: 1
kv_memory: 16MiB
block_bytes: 4KiB
models: {one: made/up, two: made/up}
"""

ELASTIC = """\
threads: 2
kv_memory: 16MiB
block_bytes: 4KiB
program: freest
rescheduling: {period: 100ms, out: 2000, into: 2000}
models: {one: made/up, two: made/up}
units:
  - {models: [one, two], threads: 1, replicas: {least: 1, most: 2, low: 1e7, high: 1e8, seconds: 1s}}
"""

WOVEN = """\
threads: 2
kv_memory: 16MiB
block_bytes: 4KiB
models: {one: made/up, two: made/up}
units:
  - {models: [one], threads: 1}
  - {models: [two], threads: 1}
weave: [{hot: unit-0, cold: unit-1, share: 0.5}]
"""


SEVERAL = """\
kv_memory: 16MiB
block_bytes: 4KiB
program: disaggregate
models: {one: made/up, two: made/up}
units:
  - {models: [one, two], threads: 1, node: 10.0.0.1}
  - {models: [one, two], threads: 1, node: 10.0.0.2}
"""


def write_files(folder: Path) -> None:
    """A plan and a config with a profile, the workloads for each, and others that are wrong."""
    write_plan(folder / "plan.json", make_plan())
    write_plan(folder / "sharded.json", make_plan(gpus=2))
    write_plan(folder / "abacus.json", make_plan(device="abacus"))
    write_plan(folder / "cores.json", make_plan(models=("one", "two"), device="cpu"))
    write_plan(folder / "many.json", make_plan(models=("one", "two"), device="cpu", gpus=3))
    write_plan(folder / "unmeasured.json", make_plan(models=("one", "six"), device="cpu"))
    plan = (folder / "plan.json").read_text()
    (folder / "cut.json").write_text(plan[: len(plan) // 2])
    (folder / "later.json").write_text(json.dumps(json.loads(plan) | {"version": 99}))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "three.yaml").write_text(CONFIG.replace("two:", "three:"))
    (folder / "elastic.yaml").write_text(ELASTIC)
    still = ELASTIC.replace("rescheduling: {period: 100ms, out: 2000, into: 2000}", "rescheduling: none")
    (folder / "still.yaml").write_text(re.sub(r"replicas: {.*?}", "replicas: 2", still))
    (folder / "ranks.yaml").write_text(
        re.sub(r"replicas: {.*?}", "tensor_parallel: 2", still).replace("1, t", "2, t")
    )
    (folder / "woven.yaml").write_text(WOVEN)
    (folder / "apart.yaml").write_text(WOVEN.replace("0.5", "0"))
    (folder / "several.yaml").write_text(SEVERAL)
    write_profile(make_profile(), folder / "profile.json")
    write_profile(replace(make_profile(), overheads=OVERHEADS), folder / "with_overheads.json")
    (folder / "small.yaml").write_text(SPEC)
    (folder / "others.yaml").write_text(SPEC.replace("[a, b]", "[a, c]"))
    (folder / "measured.yaml").write_text(SPEC.replace("[a, b]", "[one, two]").replace("400", "20"))
    long = SPEC.replace("[a, b]", "[one, two]").replace("[2, 40]", "[150, 300]").replace("400", "6")
    (folder / "long.yaml").write_text(long)
    (folder / "empty.yaml").write_text(SPEC.replace("requests: 40", "seconds: 0.0000001"))
    (folder / "cluster.yaml").write_text("nodes: [{device: A10, gpus: 1}]\nmodels: {a: {shape: llama-7b}}\n")
    (folder / "bad.yaml").write_text(SPEC.replace("rate: 400", "rate: -4"))
