"""The fleet scheduler before several gateways."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvloom.cluster.scheduler import EveryGateway
from kvloom.types.errors import Unavailable
from kvloom.types.service import FleetState, Pair, Pairs, Scale, Steps, UnitGroup
from tests.cluster.loads import model, unit


@dataclass
class Gateway:
    """Satisfies `FleetControl`."""

    waiting: int = 0
    idle: float = 0.0
    deaf: bool = False
    told: list[Pairs | Steps] = field(default_factory=list)

    async def state(self) -> FleetState:
        self._answer()
        group = UnitGroup(frozenset({"u"}), Scale(0, 1), idle=self.idle)
        return FleetState(loads={"u": unit(model(3, 480))}, waiting={"m": self.waiting}, groups={"g": group})

    async def pair(self, pairs: Pairs) -> None:
        self._answer()
        self.told.append(pairs)

    async def scale(self, steps: Steps) -> None:
        self._answer()
        self.told.append(steps)

    def _answer(self) -> None:
        if self.deaf:
            raise Unavailable("the gateway cannot be reached")


PAIRS = Pairs(pairs=(Pair("u", "v"),), seconds=1.0)


async def test_what_each_gateway_knows_is_put_together() -> None:
    one, other = Gateway(2, 90.0), Gateway(3, 5.0)
    every = EveryGateway(lambda: [one, other])
    state = await every.state()
    assert (state.waiting, state.groups["g"].idle, list(state.loads)) == ({"m": 5}, 5.0, ["u"])
    await every.pair(PAIRS)
    await every.scale(Steps(start=("u",)))
    assert one.told == [PAIRS, Steps(start=("u",))]  # One edits what all share.
    assert other.told == [PAIRS]


async def test_a_gateway_that_does_not_answer_may_have_requests() -> None:
    deaf, well = Gateway(deaf=True), Gateway(1, 90.0)
    every = EveryGateway(lambda: [deaf, well])
    state = await every.state()
    assert (state.waiting, state.groups["g"].idle) == ({"m": 1}, 0.0)
    await every.pair(PAIRS)
    await every.scale(Steps())
    assert well.told == [PAIRS, Steps()]


@pytest.mark.parametrize("gateways", [[], [Gateway(deaf=True), Gateway(deaf=True)]])
async def test_if_none_answers_that_is_told(gateways: list[Gateway]) -> None:
    every = EveryGateway(lambda: gateways)
    for asked in (every.state, lambda: every.pair(PAIRS), lambda: every.scale(Steps())):
        with pytest.raises(Unavailable):
            await asked()
