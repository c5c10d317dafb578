"""Two jobs at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from statistics import median

from kvloom.plan.cost.profile import Crowded, Doing
from kvloom.profiling.setting import Limits, Setting, decode, prefill
from kvloom.profiling.stage import Stage

PROMPT_TOKENS, CONTEXT = 256, 128
FEW, MANY = 4, 32  # sequences of a decode step
MOST_PAIRS = 24


def pairs(models: Sequence[str], cores: int, limits: dict[str, Limits]) -> list[tuple[Setting, Setting]]:
    """Prefills beside decodes, and decodes beside decodes of another model, on half of the cores each; with
    many models, not all of them with each other."""
    found = [pair for pair in _pairs(models, cores, limits) if _fit(pair, limits)]
    every = -(-len(found) // MOST_PAIRS) if found else 1
    return found[::every]


def _pairs(models: Sequence[str], cores: int, limits: dict[str, Limits]) -> Iterator[tuple[Setting, Setting]]:
    half, rest = (cores + 1) // 2, cores // 2
    if rest == 0:
        return
    for one, other in itertools.product(models, repeat=2):
        tokens, context = min(PROMPT_TOKENS, limits[one].chunk), min(CONTEXT, limits[other].context // 2)
        for batch in (FEW, MANY):
            yield prefill(one, half, 1, tokens), decode(other, rest, batch, context)
    for one, other in itertools.combinations(models, 2):
        contexts = [min(CONTEXT, limits[model].context // 2) for model in (one, other)]
        yield decode(one, rest, MANY, contexts[0]), decode(other, rest, FEW, contexts[1])


def _fit(pair: tuple[Setting, Setting], limits: dict[str, Limits]) -> bool:
    """Each in half of the pool."""
    return all(
        setting.fits(limits[setting.model])
        and 2 * sum(a + b for a, b in zip(setting.starts, setting.appends, strict=True))
        <= limits[setting.model].tokens
        for setting in pair
    )


async def measure_pair(stage: Stage, pair: tuple[Setting, Setting], repeats: int) -> list[Crowded]:
    """Both of them, each beside the other."""
    first, second = pair
    with stage.placed(first) as these, stage.placed(second) as those:
        alone = [await _alone(stage, first, these, repeats), await _alone(stage, second, those, repeats)]
        enough = asyncio.Event()
        counts = [0, 0]

        async def again(which: int, setting: Setting, ids: list[int]) -> list[float]:
            """Until both have been measured often enough. The first job began before the other did, and the
            last may have ended after it."""
            seconds = []
            while not enough.is_set():
                seconds.append(await stage.run(setting, ids))
                counts[which] += 1
                if min(counts) >= repeats + 2:
                    enough.set()
            return seconds[1:-1]

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(again(0, first, these)), group.create_task(again(1, second, those))]
    found = []
    for i, (setting, beside) in enumerate(((first, second), (second, first))):
        found.append(
            Crowded(
                doing=_doing(setting),
                beside=_doing(beside),
                alone=alone[i],
                seconds=median(running[i].result()),
            )
        )
    return found


async def _alone(stage: Stage, setting: Setting, ids: list[int], repeats: int) -> float:
    await stage.run(setting, ids)
    return median([await stage.run(setting, ids) for _ in range(repeats)])


def _doing(setting: Setting) -> Doing:
    return Doing.of(setting.work(setting.cores), setting.cores)
