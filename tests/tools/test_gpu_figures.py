"""What `make gpu-check` measures of several models, of moves and of weaving, with the CPU as its device."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.downtime import Found
from hypothesis import given
from hypothesis import strategies as st
from tools.gpu_checks import moving, several, systems, weaving
from tools.gpu_checks.memory import over_nixl
from tools.gpu_checks.models import Shape, executor_of, make_models, running, spec_of
from tools.gpu_checks.moving import MODEL, units
from tools.gpu_checks.report import Figure
from tools.gpu_checks.several import Judge, Played, ratios
from tools.gpu_checks.systems import MULTIPLEXING, SPATIAL, TEMPORAL, Apart, Stage, divided, shared_out

from kvloom.kernels.driver import DriverError
from kvloom.lab.workload.request import Alone, RequestResult, WorkloadRequest
from kvloom.transfer.cuda_ipc import CudaIpcTransport
from tests.exec.cuda.woven import twins
from tests.tools.gpu_host import TINY, ground
from tests.transfer.device_memory import SharedMemory
from tests.transfer.kinds import NIXL

SMALLER = Shape("LlamaConfig", TINY.form | {"num_hidden_layers": 1})
SEVERAL = several.Effort(
    plays=((2.1, (0.5,)),),
    window=1.0,
    grace=1.0,
    burst=(1.8, 60),  # so long that a machine that stands still for a moment answers some of it
    longest=64,
    scales=(10.0,),
    kv_bytes=2 << 20,
    most_running=4,
    chunk=32,
)
MOVING = moving.Effort(
    shape="tiny",
    length=300,
    context=2000,
    beside=1,
    rounds=1,
    kv_bytes=4 << 20,
    most_running=4,
    chunk=64,
)
WEAVING = weaving.Effort(
    hot=3,
    cold=1,
    pages=40,
    prompt=8,
    output=600,
    seconds=0.2,
    kv_bytes=4 << 20,
    most_running=4,
    chunk=32,
)


@pytest.fixture
def often() -> Iterator[None]:
    """Threads that wait for each other, as devices do, change more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


def test_three_systems_serve_the_same_requests() -> None:
    """Each model's part of the device and of the pool is its own in one of them."""
    found = list(several.several(ground(), {"a": TINY, "b": SMALLER, "c": SMALLER}, SEVERAL))
    for name in (MULTIPLEXING, SPATIAL, TEMPORAL):
        mine = [figure for figure in found if f", {name}: " in figure.name]
        assert [figure.unit.split()[0] for figure in mine] == ["of", "tokens/s"]
        told = re.match(r"that can be judged \(((, )?\w \d+ of \d+)*\); 0 failed", mine[0].note)
        assert told, mine[0].note
        assert mine[1].note.startswith("timers late by ")
        assert ("multiprocessors a 5, b 2, c 1" in mine[0].note) == (name == SPATIAL)
        assert mine[1].value > 0
    compared = [figure for figure in found if "/ the better of the others" in figure.name]
    assert len(compared) == 2


def test_a_split_device_is_split() -> None:
    """And the others have all of it, each by its own policy."""
    stage = Stage.make({"a": TINY, "b": SMALLER}, ground(), 1 << 20, most_running=2, chunk=16)
    rates = {"a": 0.75, "b": 0.25}
    split = Apart(stage, rates)
    split.make()
    executors = split.executors
    spans = sorted((one.arena.bytes.data_ptr(), one.arena.bytes.numel()) for one in executors.values())
    assert spans[0][0] + spans[0][1] <= spans[1][0]
    assert sum(size for _, size in spans) <= stage.arena.bytes.numel()
    assert sum(one.compute for one in executors.values()) == stage.shared.compute

    async def policies() -> dict[str, list[str]]:
        found = {}
        with stage.systems(rates) as (served, _):
            for name, serving in served.items():
                async with serving() as engines:
                    found[name] = [(await engine.load()).policy for engine in set(engines.values())]
        return found

    assert asyncio.run(policies()) == {
        MULTIPLEXING: ["adbs"],
        SPATIAL: ["partitioned"] * 2,
        TEMPORAL: ["fcfs"],
    }
    split.close()
    stage.close()


def test_what_is_wrong_with_a_split_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise DriverError("no more green contexts")

    monkeypatch.setattr(systems, "split", refused)
    figures, found = several.several(ground(), {"a": TINY, "b": SMALLER}, SEVERAL), list[Figure]()

    def all_of_them() -> None:
        for figure in figures:
            found.append(figure)  # those before the error count

    with pytest.raises(RuntimeError, match=r"requests/s, spatial: DriverError: no more green contexts"):
        all_of_them()
    tokens = [figure for figure in found if "multiplexing / " in figure.name]
    assert [(figure.reached, figure.note) for figure in tokens] == [(None, "without spatial, so no verdict")]
    assert any(", temporal: tokens" in figure.name for figure in found)


def played(*ends: tuple[float, float | None]) -> Played:
    """When requests were due, and how long they took."""
    asks = [(WorkloadRequest(at=at, model="m", prompt=10, output=11), end) for at, end in ends]
    outcomes = [
        RequestResult(request=ask, first=0.1, end=end, tokens=11, error="" if end else "full")
        for ask, end in asks
    ]
    return Played(outcomes, 11 * len(ends))


def test_a_request_is_in_time_or_late_or_cannot_be_judged() -> None:
    judge = Judge(4.0, {"m": Alone(start=0.5, per_prompt=0.05, per_token=0.1)}, 10.0)
    assert judge.takes(WorkloadRequest(at=0, model="m", prompt=10, output=11)) == 2.0
    some = played((0.0, 7.9), (1.0, 8.1), (1.5, None), (1.9, 0.5), (2.1, 0.5))
    assert [judge.judged(one.request) for one in some.outcomes] == [True, True, True, True, False]
    assert judge.met(some) == 2


def test_it_is_against_the_better_of_the_others_each_at_its_best_rate() -> None:
    judge = Judge(1.0, {"m": Alone(1.0, 0.0, 0.0)}, 10.0)
    met = [{MULTIPLEXING: 6, SPATIAL: 2, TEMPORAL: 3}, {MULTIPLEXING: 2, SPATIAL: 4, TEMPORAL: 1}]
    found = [{name: played(*[(0.0, 0.5)] * count) for name, count in one.items()} for one in met]
    names = [figure.name for figure in ratios(2.1, found, [judge], 1.5)]
    both = list(ratios(2.1, found, [judge], 1.5))
    assert [figure.value for figure in both] == [1.5, 1.5]
    assert [figure.reached for figure in both] == [True, True]
    assert len(set(names)) == 2


def test_against_nothing_there_is_no_verdict() -> None:
    judge, none = Judge(1.0, {"m": Alone(1.0, 0.0, 0.0)}, 10.0), Played([], 0)
    found = {MULTIPLEXING: played(*[(0.0, 0.5)] * 6), SPATIAL: none, TEMPORAL: none}
    for ratio in ratios(2.1, [found], [judge], 1.5):
        assert (ratio.reached, ratio.unit) == (None, "to 0")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(6, 40))
def test_parts_are_in_proportion_and_nobody_has_none(weights: list[float], whole: int) -> None:
    parts = divided(whole, weights)
    assert sum(parts) == whole
    assert min(parts) >= 1
    for part, weight in zip(parts, weights, strict=True):
        assert part <= max(1, math.ceil(whole * weight / sum(weights)) + len(weights))
    groups = [str(i) for i in range(whole)]
    shared = shared_out(groups, weights)
    assert [len(one) for one in shared] == parts
    assert [group for part in shared for group in part] == groups


def test_a_request_moves_between_two_processes(tmp_path: Path) -> None:
    """This one's engine is the target."""

    async def move() -> list[Found]:
        here, setup = ground(), moving.setup("source", MOVING, tmp_path, "secret")
        arena = here.arena(MOVING.kv_bytes)
        most, chunk = MOVING.most_running, MOVING.chunk
        made = make_models({MODEL: TINY}, here)
        executor = executor_of(made, arena, here, most_running=most, chunk=chunk)
        spec = spec_of(executor, "adbs", max_running=most, chunk=chunk, unit="target")
        transport = CudaIpcTransport("target", arena, SharedMemory())
        async with (
            units([setup], MOVING.patience, "tests.tools.gpu_host") as (source,),
            running(executor, spec, transport) as target,
        ):
            found = await moving.moves(source, target, MOVING)
            assert (await target.load()).models[MODEL].received_tokens_total >= MOVING.length
            return found

    downtime, slower, whole = moving.told(asyncio.run(move()), MOVING)
    assert downtime.most is not None
    assert downtime.most > 0
    assert (slower.unit, whole.unit) == ("%", "ms")
    assert whole.value > 0


@pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'")
def test_what_goes_over_nixl_is_timed_and_looked_at() -> None:
    [figure] = over_nixl(torch.device("cpu"), pages=2)
    assert (figure.unit, figure.least, figure.most) == ("GB/s", None, None)
    assert figure.value > 0


def test_a_unit_that_does_not_start_is_not_waited_for(tmp_path: Path) -> None:
    async def start() -> None:
        setup = moving.setup("source", MOVING, tmp_path, "secret")
        async with units([setup], MOVING.patience, "tests.tools.gpu_part"):
            raise AssertionError("it has started")

    with pytest.raises(RuntimeError, match="source did not start"):
        asyncio.run(start())


@pytest.mark.usefixtures("often")
def test_a_hot_unit_is_measured_with_and_without_its_loan() -> None:
    found = list(weaving.weaving(ground(twins()), SharedMemory(), (TINY, SMALLER), WEAVING))
    home, kernels, host, ratio = found
    assert "; 0% of the tokens are away" in home.note
    for figure in (kernels, host):
        assert figure.value > 0
        assert "; 0% of the tokens" not in figure.note
    assert (ratio.value, ratio.least) == (kernels.value / host.value, weaving.WANTED)


def test_what_a_loan_lacks_is_told() -> None:
    """After what has been measured without it."""
    short, found = replace(WEAVING, pages=4000), list[Figure]()
    figures = weaving.weaving(ground(twins()), SharedMemory(), (TINY, SMALLER), short)

    def all_of_them() -> None:
        for figure in figures:
            found.append(figure)  # those before the error count

    with pytest.raises(BaseExceptionGroup) as error:
        all_of_them()
    assert error.group_contains(Exception, match="lend")
    assert [figure.name for figure in found] == ["hot unit, all at home"]
