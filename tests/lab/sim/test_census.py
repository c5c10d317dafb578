"""How many units have had a process, over the time."""

from __future__ import annotations

import pytest

from kvloom.lab.sim.processes import Census


class At:
    """Satisfies `Clock`."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a census waits for nobody")


def test_each_number_counts_for_as_long_as_it_lasts() -> None:
    clock = At()
    census = Census(clock)
    for _ in range(3):
        census.more()
    assert (census.mean, census.least, census.most) == (3.0, 3, 3)
    clock.time = 10.0
    census.less()
    census.less()
    clock.time = 15.0
    census.more()
    census.less()  # lasts no time
    clock.time = 20.0
    assert census.mean == pytest.approx((3 * 10 + 1 * 10) / 20)
    assert (census.least, census.most) == (1, 3)
    census.less()
    assert census.mean == pytest.approx(2.0)
    assert census.least == 0
