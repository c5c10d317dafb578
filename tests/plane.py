"""The modelled KV plane where there is no time: copies take turns of the event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from kvloom.lab.sim.links import ModelledPlane, ModelledTransport
from kvloom.types.geometry import AnyArray

_SLOTS = 32


class Numbers(Protocol):
    """An arena [blocks, tokens of a block] in which one number stands for K and V of a token."""

    arena: AnyArray
    blocks: int


class Turns:
    """Satisfies `Link`: whatever goes out takes a few turns, drawn by the seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def wait(self, size: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def step(left: int) -> None:
            if left:
                loop.call_soon(step, left - 1)
            else:
                then()

        loop.call_soon(step, self._random.randint(0, 3))


class Plane:
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._plane = ModelledPlane()

    def join(self, unit: str, executor: Numbers) -> ModelledTransport:
        link = Turns(f"{self._seed}/{unit}")
        return self._plane.join(unit, executor.blocks, link, arena=executor.arena, slots=_SLOTS)
