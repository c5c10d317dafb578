"""Memory that goes from range to range by granules, on any way, over a driver that allows nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.exec.cuda.granules import AddressRange, GranuleArena, Granules
from kvloom.kernels.driver import DriverError
from kvloom.types.errors import ConfigError
from tests.exec.cuda.host_driver import HostDriver

CPU = torch.device("cpu")


def test_a_granule_holds_whole_blocks_and_whole_pieces_of_the_driver() -> None:
    assert Granules(HostDriver(4096), CPU, 6144).size == 12288
    assert Granules(HostDriver(8192), CPU, 2048).size == 8192


def test_what_is_there_when_the_device_has_too_little_is_given_back() -> None:
    driver = HostDriver(granules=5)
    granules = Granules(driver, CPU, 2048)
    with pytest.raises(
        ConfigError, match=r"memory: cpu gives 5 of 8 more pieces of 4,096 bytes .*OUT_OF_MEM"
    ):
        granules.create(8)
    assert (granules.idle, driver.handles) == (0, {})
    granules.create(5)


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_refuses_in_the_middle_leaves_nothing_mapped(name: str) -> None:
    driver = HostDriver()
    granules = Granules(driver, CPU, 2048)
    granules.create(4)
    there = granules.reserve(4)
    driver.failing[name] = 2
    with pytest.raises(OSError, match=f"cpu maps no memory: {name}"):
        granules.supply(there, range(4))
    assert (granules.idle, driver.mapped, there.is_held) == (4, {}, False)
    granules.supply(there, range(4))
    assert driver.open == set(driver.mapped)
    granules.close()
    assert (driver.reserved, driver.handles) == ({}, {})


def test_an_arena_gives_up_whole_granules_alone_and_keeps_its_address() -> None:
    driver = HostDriver()
    granules = Granules(driver, CPU, 1024)
    granules.create(4)
    arena = GranuleArena(granules, 4, 1024)
    assert (arena.blocks, arena.bytes.numel()) == (16, 16384)
    at = arena.bytes.data_ptr()
    arena.bytes.fill_(7)
    for blocks in ([0, 1, 2], [3, 4, 5, 6], range(5)):
        with pytest.raises(ValueError, match="want whole granules of 4"):
            arena.discard(np.asarray(blocks, np.int32))
    assert granules.idle == 0
    arena.discard(np.asarray([*range(12, 16), *range(4, 8)], np.int32))
    assert granules.idle == 2
    assert arena.bytes[:4096].eq(7).all()
    assert arena.bytes[8192:12288].eq(7).all()
    arena.restore(np.arange(4, 8, dtype=np.int32))
    arena.bytes[4096:8192] = 9
    assert granules.idle == 1
    assert arena.bytes.data_ptr() == at


def test_a_pool_that_cannot_be_mapped_is_an_error_of_the_config() -> None:
    driver = HostDriver()
    granules = Granules(driver, CPU, 1024)
    granules.create(2)
    with pytest.raises(ConfigError, match="memory: the pool cannot be mapped: 3 granules are wanted, and 2"):
        GranuleArena(granules, 3, 1024)


def test_what_is_lent_comes_back_whatever_happens_meanwhile() -> None:
    driver = HostDriver()
    granules = Granules(driver, CPU, 2048)
    reserved = granules.reserve(3)
    with pytest.raises(RuntimeError, match="no weights"), granules.lent(reserved):
        raise RuntimeError("no weights")
    driver.failing["cuMemMap"] = 1
    with pytest.raises(OSError, match="cpu maps no memory"), granules.lent(reserved):
        pass
    assert (granules.idle, driver.mapped, driver.handles, reserved.is_held) == (0, {}, {}, False)


class GranulesMachine(RuleBasedStateMachine):
    """No granule is lost or at two places, whatever the driver refuses, and what was written stays."""

    PLACES = 4

    def __init__(self) -> None:
        super().__init__()
        self.driver = HostDriver(granules=9)
        self.granules = Granules(self.driver, CPU, 2048)
        self.ranges: list[AddressRange] = []
        self.tensors: list[torch.Tensor] = []
        self.written: dict[tuple[int, int], int] = {}
        self.made = 0
        for _ in range(3):
            reserved = self.granules.reserve(self.PLACES)
            self.ranges.append(reserved)
            with self.granules.lent(reserved) as memory:
                self.tensors.append(memory)

    @rule(count=st.integers(1, 5))
    def create(self, count: int) -> None:
        if self.made + count > 9:
            with pytest.raises(ConfigError):
                self.granules.create(count)
        else:
            self.granules.create(count)
            self.made += count

    @rule(
        number=st.integers(0, 2),
        picked=st.sets(st.integers(0, 3)),
        refused=st.none() | st.tuples(st.sampled_from(["cuMemMap", "cuMemSetAccess"]), st.integers(0, 3)),
        value=st.integers(1, 255),
    )
    def supply(self, number: int, picked: set[int], refused: tuple[str, int] | None, value: int) -> None:
        there = self.ranges[number]
        places = sorted(place for place in picked if there.held[place] is None)
        if refused is not None:
            self.driver.failing[refused[0]] = refused[1]
        before = self.granules.idle
        fails = len(places) > before or (refused is not None and refused[1] < len(places))
        try:
            self.granules.supply(there, places)
        except OSError:
            assert fails
            assert self.granules.idle == before
            assert all(there.held[place] is None for place in places)
        else:
            assert not fails
            for place in places:
                self.tensors[number][4096 * place : 4096 * (place + 1)] = value
                self.written[number, place] = value
        self.driver.failing.clear()

    @rule(number=st.integers(0, 2), picked=st.sets(st.integers(0, 3)))
    def withdraw(self, number: int, picked: set[int]) -> None:
        there = self.ranges[number]
        places = sorted(place for place in picked if there.held[place] is not None)
        self.granules.withdraw(there, places)
        for place in places:
            del self.written[number, place]

    @rule(number=st.integers(0, 2))
    def a_driver_that_has_failed_takes_nothing(self, number: int) -> None:
        there = self.ranges[number]
        places = [place for place, held in enumerate(there.held) if held is not None]
        if places:
            self.driver.failing["cuMemUnmap"] = 0
            with pytest.raises(DriverError):
                self.granules.withdraw(there, places)

    @rule()
    def release(self) -> None:
        self.made -= self.granules.idle
        self.granules.release()

    @invariant()
    def nothing_is_lost_or_twice_there(self) -> None:
        mapped = [handle for _, handle in self.driver.mapped.values()]
        assert len(set(mapped)) == len(mapped) == len(self.written)
        assert self.driver.open == set(self.driver.mapped)
        assert len(mapped) + self.granules.idle == self.made == len(self.driver.handles)

    @invariant()
    def what_was_written_stays(self) -> None:
        for (number, place), value in self.written.items():
            assert self.tensors[number][4096 * place : 4096 * (place + 1)].eq(value).all()

    def teardown(self) -> None:
        self.granules.close()
        assert (self.driver.reserved, self.driver.mapped, self.driver.handles) == ({}, {}, {})


TestGranules = GranulesMachine.TestCase
