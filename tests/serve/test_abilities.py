"""The record of what a unit of each kind can do, and that real and simulated units do just that."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.exec.cpu.executor import load_executor
from kvloom.lab.sim.fleet import run_fleet
from kvloom.lab.sim.unit import PARTS, planned_units
from kvloom.router.program import load_program
from kvloom.serve.engine import open_offload, open_transport
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import KVDtype
from kvloom.types.spec import TransportName, UnitAbilities, unit_abilities
from kvloom.types.verbs import PrepRecv
from tests.checkpoints import make_checkpoint
from tests.engines import running_over, spec_of
from tests.lab.sim.fleets import unit, virtually
from tests.lab.sim.plans import make_plan

KEPT: tuple[KVDtype, ...] = ("auto", "float32", "bfloat16", "int8")
ALL = UnitAbilities(
    moves=True,
    shares=True,
    weaves=True,
    sleeps=True,
    adapts=True,
    mixes=True,
    kv_dtypes=KEPT,
    keeps=True,
    speculates=True,
)
GPU = replace(
    ALL,
    sleeps=False,
    adapts=False,
    mixes=False,
    kv_dtypes=(*KEPT[:3], "float8_e4m3fn"),
    keeps=False,
    speculates=False,
)
RANKS = replace(GPU, moves=False, shares=False, weaves=False)
NIXL = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")


@pytest.mark.parametrize(
    ("device", "ranks", "transport", "found"),
    [
        ("cpu", 1, "shm", ALL),
        ("cpu", 1, "nixl", replace(ALL, weaves=False)),
        ("cpu", 2, "shm", replace(ALL, weaves=False, sleeps=False, adapts=False)),
        ("cpu", 4, "nixl", replace(ALL, weaves=False, sleeps=False, adapts=False)),
        ("cuda:0", 1, "shm", GPU),
        ("cuda:3", 1, "nixl", replace(GPU, weaves=False)),
        ("cuda:0", 2, "shm", RANKS),
        ("A100-80", 8, "nixl", RANKS),
    ],
)
def test_the_record(device: str, ranks: int, transport: TransportName, found: UnitAbilities) -> None:
    assert unit_abilities(device, ranks, transport) == found


async def takes(engine: Engine, model: str) -> bool:
    """Whether the engine makes room for K and V that come from elsewhere."""
    try:
        await engine.prep_recv(PrepRecv(model=model, request="r", prompt=[1, 2, 3], end=2))
    except BadRequest:
        return False
    await engine.abort("r")
    return True


@pytest.mark.parametrize(
    ("ranks", "transport"), [(1, "shm"), (2, "shm"), (2, "tcp"), pytest.param(1, "nixl", marks=NIXL)]
)
def test_a_real_unit_does_what_the_record_says(tmp_path: Path, ranks: int, transport: TransportName) -> None:
    spec = spec_of({"a": make_checkpoint(tmp_path, "llama")})
    spec = replace(spec, tensor_parallel=ranks, transport=transport)

    async def check() -> None:
        executor = load_executor(spec)
        plane = open_transport(spec, executor.arena)
        offload = open_offload(spec, executor, plane)
        async with running_over(spec, executor, plane, offload) as engine:
            assert await takes(engine, "a") == spec.abilities.moves
            assert (offload is not None) == spec.abilities.weaves

    asyncio.run(check())


@pytest.mark.parametrize(
    ("device", "ranks", "moves"),
    [("cpu", 1, True), ("cpu", 2, True), ("cuda:0", 1, True), ("cuda:0", 2, False)],
)
@virtually
async def test_a_simulated_unit_does_what_the_record_says(device: str, ranks: int, moves: bool) -> None:
    made = unit(ranks=ranks, device=device)
    async with run_fleet([made], load_program("data_parallel")) as fleet:
        (engine,) = fleet.engines.values()
        assert await takes(engine, "small") == made.spec.abilities.moves == moves
        assert (await engine.load()).moves == made.spec.abilities.moves


@pytest.mark.parametrize(("gpus", "parts"), [(1, PARTS), (2, 1)])
def test_jobs_of_a_simulated_unit_of_gpus_share_them_out_or_take_turns(gpus: int, parts: int) -> None:
    found = planned_units(make_plan(1, gpus=gpus))
    assert [one.compute for one in found] == [parts]
    assert [one.spec.abilities.shares for one in found] == [parts > 1]
