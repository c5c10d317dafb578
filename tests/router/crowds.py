"""A modelled engine in which nobody else finds room."""

from __future__ import annotations

import asyncio

from tests.engine.plays import Reader
from tests.modelled import turns
from tests.modelled_units import MODEL, Unit, generate, prompt

LENGTHS = (80, 40, 20, 8)  # tokens: as many of each as there is room for


async def fill(unit: Unit, length: int) -> list[Reader]:
    """With requests that stand still and keep what they hold, until a prompt of `length` does not fit."""
    engine, crowd = unit.engine, list[Reader]()
    geometry = engine.pool.caches[MODEL].geometry
    for size in LENGTHS:
        while engine.pool.available >= geometry.blocks(max(size + 4, length)):
            name = f"crowd-{len(crowd)}"
            reader = Reader(unit, generate(prompt(size, first=len(crowd) + 50), request=name, max_tokens=4))
            await reader.until(1)
            await engine.hold(name)
            crowd.append(reader)
    return crowd


async def disperse(unit: Unit, crowd: list[Reader]) -> None:
    for reader in crowd:
        await unit.engine.abort(reader.body.request)
    await asyncio.gather(*(reader.task for reader in crowd))


async def until_waiting(unit: Unit, count: int = 1) -> None:
    """So many do."""
    while (await unit.engine.load()).models[MODEL].waiting < count:
        await turns(1)
