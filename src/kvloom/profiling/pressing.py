"""Jobs beside work that is none: other processes that want their cores, and their own process's loop."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from kvloom.plan.cost.profile import Doing, Pressed, Stalled
from kvloom.profiling.setting import Limits, Setting, decode, prefill
from kvloom.profiling.stage import Stage

PROMPT_TOKENS, CONTEXT = 256, 128
FEW, MANY = 4, 32  # sequences of a decode step
OVER: Final = (1, 2)  # threads more than there are cores
BURST: Final = 0.001  # seconds of the loop's work at a time, at most
ENOUGH: Final = 0.3  # seconds of a job's runs, within its repeats and MOST
MOST: Final = 40
_BUSY: Final = "print(flush=True)\nwhile True: pass"


def pressed_settings(model: str, cores: int, limits: Limits, *, quick: bool = False) -> list[Setting]:
    """A prefill and two decode steps, on one core, half of them and all. quick: one step, all cores alone."""
    context = min(CONTEXT, limits.context // 2)
    found = []
    for share in sorted({cores} if quick else {1, (cores + 1) // 2, cores}):
        found.append(prefill(model, share, 1, min(PROMPT_TOKENS, limits.chunk)))
        found += [decode(model, share, batch, context) for batch in ((FEW,) if quick else (FEW, MANY))]
    return [setting for setting in found if setting.fits(limits)]


async def measure_pressed(
    stage: Stage, settings: Sequence[Setting], cores: int, repeats: int
) -> list[Pressed]:
    """Each of them beside as many busy processes as want `OVER` threads more than the machine's cores, and
    alone just before, because the machine's own pace changes."""
    found = []
    wanted = sorted(itertools.product(settings, OVER), key=lambda pair: cores - pair[0].cores + pair[1])
    for busy, group in itertools.groupby(wanted, key=lambda pair: cores - pair[0].cores + pair[1]):
        with busy_processes(busy) as crowd:
            for setting, over in group:
                crowd.rest()
                alone = median(await _runs(stage, setting, repeats))
                crowd.work()
                seconds = fmean(await _runs(stage, setting, repeats))
                found.append(Pressed(doing=_doing(setting), over=over, alone=alone, seconds=seconds))
    return found


async def measure_stalled(stage: Stage, settings: Sequence[Setting], repeats: int) -> list[Stalled]:
    """Each of them while this process's loop works by turns in the first half of the job's time, as an engine
    does that sends what the job before has drawn."""
    found = []
    for setting in settings:
        alone = median(await _runs(stage, setting, repeats))
        with stage.placed(setting) as ids:
            stalled = [await _beside_loop(stage, setting, ids, alone) for _ in range(_count(alone, repeats))]
        found.append(
            Stalled(
                doing=_doing(setting),
                busy=median(busy for busy, _ in stalled),
                alone=alone,
                seconds=median(seconds for _, seconds in stalled),
            )
        )
    return found


async def _runs(stage: Stage, setting: Setting, repeats: int) -> list[float]:
    with stage.placed(setting) as ids:
        first = await stage.run(setting, ids)
        return [await stage.run(setting, ids) for _ in range(_count(first, repeats))]


def _count(seconds: float, repeats: int) -> int:
    return max(repeats, min(MOST, int(ENOUGH / seconds)))


async def _beside_loop(stage: Stage, setting: Setting, ids: list[int], alone: float) -> tuple[float, float]:
    """Seconds that the loop worked, and of the job."""
    job = asyncio.ensure_future(stage.run(setting, ids))
    await asyncio.sleep(0)  # it is launched
    began, busy = time.perf_counter(), 0.0
    burst = min(BURST, alone / 2)
    while not job.done() and time.perf_counter() - began < alone / 2:
        busy += _work(burst)
        await asyncio.sleep(burst)
    return busy, await job


def _work(seconds: float) -> float:
    """Python's own, for about so long; how long it was."""
    began = now = time.perf_counter()
    while now - began < seconds:
        now = time.perf_counter()
    return now - began


@dataclass(frozen=True, slots=True)
class Crowd:
    """Processes that each keep a core busy while they have one, and may rest."""

    processes: list[subprocess.Popen[bytes]]

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def work(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def busy_processes(count: int) -> Iterator[Crowd]:
    """So many, at work, until the block ends."""
    with ExitStack() as stack:
        running = []
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-S", "-c", _BUSY], stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        yield Crowd(running)


def _doing(setting: Setting) -> Doing:
    return Doing.of(setting.work(setting.cores), setting.cores)
