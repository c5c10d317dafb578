"""Weights that sleep on a device: its memory is the host's, mapped by granules, and what has none may not be
touched."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from torch import Tensor, nn

from kvloom.exec.cuda.device import GpuDevice, HostStream, PartitionLane, StreamEvent
from kvloom.exec.cuda.granules import Granules
from kvloom.exec.cuda.loader import load_within_budget
from kvloom.exec.cuda.operations import plain_operations, triton_operations
from kvloom.exec.cuda.weights import GpuWeights, SleepingWeights
from kvloom.types.errors import ConfigError
from kvloom.types.spec import EngineSpec
from tests import interpreter
from tests.checkpoints import make_checkpoint
from tests.engines import ask, body, spec_of
from tests.exec.cuda.devices import one_lane
from tests.exec.cuda.engines import running_executor
from tests.exec.cuda.host_driver import HostDriver
from tests.oracle import Oracle

CPU = torch.device("cpu")
GRANULE, CHUNK = 4096, 8192


class Layer(nn.Module):
    def __init__(self, value: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(value)), requires_grad=False)


class Model(nn.Module):
    """Its embedding and its head are one tensor; the layers come before the embedding."""

    part: Tensor

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, 2048) for i in range(layers))
        self.embed = nn.Parameter(torch.arange(60.0).view(6, 10).t(), requires_grad=False)
        self.head = self.embed
        self.register_buffer("halves", torch.ones(7, dtype=torch.bfloat16))
        self.register_buffer("part", self.embed.detach()[2:5])
        self.register_buffer("none", torch.empty(0))

    def within(self) -> list[Tensor]:
        return [*self.buffers(), *self.parameters()]


@dataclass(eq=False)
class Point(StreamEvent):
    waits: int = 0

    def wait(self) -> None:
        self.waits += 1


@dataclass
class Watched(HostStream):
    """Notes its marks, and those for which it waits."""

    marks: list[Point] = field(default_factory=list)
    followed: list[StreamEvent] = field(default_factory=list)

    def mark(self) -> Point:  # type: ignore[override]
        self.marks.append(Point())
        return self.marks[-1]

    def follow(self, mark: StreamEvent) -> None:
        self.followed.append(mark)


class Device(GpuDevice):
    """Its further streams are watched."""

    streams: ClassVar[list[Watched]] = []

    def beside(self) -> PartitionLane:
        self.streams.append(Watched())
        return PartitionLane(self.compute, self.streams[-1])


@dataclass
class Asleep:
    """A model's weights on a device with so many granules."""

    driver: HostDriver
    granules: Granules
    model: Model
    weights: SleepingWeights
    stream: Watched
    before: list[tuple[Tensor, tuple[int, ...]]]

    @classmethod
    def make(cls) -> Asleep:
        driver = HostDriver(GRANULE, granules=40)
        stock, model = Granules(driver, CPU, 1024), Model()
        before = [(one.clone(), one.stride()) for one in model.within()]
        device = one_lane(device=Device)
        weights = SleepingWeights(model, stock, device)
        return cls(driver, stock, model, weights, Device.streams.pop(), before)

    def check(self) -> None:
        for tensor, (content, stride) in zip(self.model.within(), self.before, strict=True):
            assert tensor.equal(content)
            assert tensor.stride() == stride

    def wake(self) -> None:
        while not self.weights.read_part():
            pass


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.cuda.weights.CHUNK", CHUNK)


def test_what_sleeps_has_no_memory_and_comes_back_the_same_at_the_same_addresses() -> None:
    made = Asleep.make()
    assert (made.driver.mapped, made.driver.handles) == ({}, {})
    at = [one.data_ptr() for one in made.model.within()]
    assert made.model.part.data_ptr() == made.model.embed[2:5].data_ptr(), "they share their memory"
    made.granules.create(made.weights.granules)
    for _ in range(2):
        parts = 1
        while not made.weights.read_part():
            parts += 1
        assert parts == 4, "three layers of a chunk each, behind what is in none"
        made.check()
        assert made.weights.is_there
        assert made.weights.read_part(), "it is there already"
        assert made.granules.idle == 0
        made.weights.let_go()
        assert (made.driver.mapped, made.granules.idle) == ({}, made.weights.granules)
        made.weights.let_go()
    assert [one.data_ptr() for one in made.model.within()] == at


def test_a_waking_for_which_there_is_too_little_memory_leaves_nothing() -> None:
    made = Asleep.make()
    made.granules.create(made.weights.granules - 1)
    with pytest.raises(OSError, match=r"7 granules are wanted, and 6 are idle"):
        made.weights.read_part()
    assert made.driver.mapped == {}
    made.granules.create(1)
    made.driver.failing["cuMemSetAccess"] = 3
    with pytest.raises(OSError, match="cpu maps no memory"):
        made.weights.read_part()
    assert (made.driver.mapped, made.granules.idle) == ({}, 7)
    made.wake()
    made.check()


def test_a_lane_waits_for_the_layers_that_come_next_and_for_no_more() -> None:
    made = Asleep.make()
    made.granules.create(7)
    assert not made.weights.read_part()
    stream = Watched()
    lane = PartitionLane(1, stream)
    marks: list[StreamEvent] = [*made.stream.marks]
    assert len(marks) == 2, "the one that is there, and the next one"
    for layer in (0, 1, 2, 3, None):
        made.weights.follow(lane, layer)
    marks = [*made.stream.marks]
    assert [marks.index(mark) for mark in stream.followed] == [1, 2, 3, 3, 3]
    made.wake()
    made.weights.follow(lane)
    assert len(stream.followed) == 5, "all is there"


def test_a_model_that_falls_asleep_while_it_is_woken_waits_for_the_copies_under_way() -> None:
    made = Asleep.make()
    made.granules.create(7)
    made.weights.read_part()
    made.weights.let_go()
    assert [mark.waits for mark in made.stream.marks] == [1, 1]
    assert made.driver.mapped == {}
    made.wake()
    made.check()


class WakingMachine(RuleBasedStateMachine):
    """Two models in the memory of one and a half, woken and put to sleep at any time, on a driver that may
    refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = HostDriver(GRANULE)
        self.granules = Granules(self.driver, CPU, 1024)
        self.models = [Model(), Model()]
        for model in self.models:
            for i, tensor in enumerate(model.parameters()):
                tensor.add_(100 * i + self.models.index(model))
        self.before = [[one.clone() for one in model.within()] for model in self.models]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvloom.exec.cuda.weights.CHUNK", CHUNK)
            self.weights = [SleepingWeights(model, self.granules, one_lane()) for model in self.models]
        self.granules.create(10)
        self.read = [0, 0]

    @rule(which=st.integers(0, 1), refused=st.none() | st.integers(0, 6))
    def read_part(self, which: int, refused: int | None) -> None:
        if refused is not None:
            self.driver.failing["cuMemMap"] = refused
        begins = not self.read[which]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvloom.exec.cuda.weights.CHUNK", CHUNK)
            try:
                last = self.weights[which].read_part()
            except OSError:
                assert begins
                assert refused is not None or self.read[1 - which]
            else:
                assert not begins or (refused is None and not self.read[1 - which])
                self.read[which] = min(self.read[which] + 1, 4)
                assert last == (self.read[which] == 4) == self.weights[which].is_there
        self.driver.failing.clear()

    @precondition(lambda self: any(self.read))
    @rule()
    def a_job_needs_all(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvloom.exec.cuda.weights.CHUNK", CHUNK)
            self.weights[self.read[1] > 0].follow(PartitionLane(1, HostStream()))
        self.same(self.read[1] > 0)

    @rule(which=st.integers(0, 1))
    def let_go(self, which: int) -> None:
        self.weights[which].let_go()
        self.read[which] = 0

    @invariant()
    def who_is_there_is_right_and_who_sleeps_has_nothing(self) -> None:
        awake = [which for which in (0, 1) if self.read[which]]
        assert len(self.driver.mapped) == 7 * len(awake) == 10 - self.granules.idle
        for which in awake:
            if self.read[which] == 4:
                self.same(which)

    def same(self, which: int) -> None:
        for tensor, told in zip(self.models[which].within(), self.before[which], strict=True):
            assert tensor.equal(told)

    def teardown(self) -> None:
        self.granules.close()
        assert (self.driver.reserved, self.driver.handles) == ({}, {})


TestWaking = WakingMachine.TestCase


def budget(paths: dict[str, Path], granules: int) -> EngineSpec:
    """Blocks are granules: a pool gives blocks up as they come."""
    spec = spec_of(paths, max_running=2, chunk_tokens=16, block_bytes=GRANULE)
    return replace(spec, kv_bytes=granules * GRANULE, sleep_dir="/nowhere")


def test_a_budget_that_does_not_hold_the_largest_model(tmp_path: Path) -> None:
    spec = budget({"m": make_checkpoint(tmp_path, "llama", num_hidden_layers=1)}, 4)
    with pytest.raises(
        ConfigError, match=r"memory: 16,384 bytes do not hold m .* at least [\d,]+ are needed"
    ):
        load_within_budget(spec, one_lane(), plain_operations(), HostDriver(GRANULE))


@pytest.mark.skipif(not interpreter.INSTALLED, reason="triton is not installed: pip install '.[gpu]'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver here is one of the host's memory")
def test_same_tokens_in_the_memory_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels in the interpreter, over a pool whose blocks nobody may touch while weights have their
    memory. A prefill waits for its layers one after the other, a decode step for all."""
    followed: list[tuple[str, int | None]] = []
    follow = GpuWeights.follow

    def noted(self: GpuWeights, model: str, lane: PartitionLane, layer: int | None = None) -> None:
        followed.append((model, layer))
        follow(self, model, lane, layer)

    monkeypatch.setattr(GpuWeights, "follow", noted)
    paths = {
        name: make_checkpoint(tmp_path / name, kind, num_hidden_layers=2)
        for name, kind in {"a": "llama", "b": "qwen3"}.items()
    }
    prompts = {"a": [5, 6, 7, 8], "b": [9, 8, 7]}
    spec, driver = budget(paths, 140), HostDriver(GRANULE)

    async def play() -> tuple[list[list[int]], int]:
        executor = load_within_budget(spec, one_lane(), triton_operations(), driver)
        assert executor.weights is not None
        needed = executor.weights.blocks
        assert max(needed.values()) < executor.blocks < sum(needed.values())
        async with running_executor(spec, executor) as engine:
            followed.clear()
            answers = [await ask(engine, body(name, prompts[name], max_tokens=3)) for name in "aba"]
            loads = (await engine.load()).models.values()
            wakes = sum(one.weights.wakes_total for one in loads if one.weights)
        assert (driver.reserved, driver.handles) == ({}, {}), "all is given back"
        return [answer.tokens[0] for answer in answers], wakes

    interpreter.load()
    with interpreter.interpreting():
        found, wakes = asyncio.run(play())
    assert wakes >= 3
    assert followed[:4] == [("a", 0), ("a", 1), ("a", 2), ("a", None)]
    for name, tokens in zip("aba", found, strict=True):
        Oracle(paths[name]).check(prompts[name], tokens)
