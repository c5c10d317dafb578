"""How long the fleet scheduler takes for a period: 64 units, and 1,000.

python -m benchmarks.fleet [--units 64 1000]. CPU time of this process, so that neighbours on the machine do
not count: the reports are read from their bytes, all pairs are made and replicas counted, and every pair's
source chooses a request. Each unit serves two to four of 20 models.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.cluster.scheduler import Period, decide
from kvloom.engine.freeness import Thresholds
from kvloom.engine.migration import MigrationCandidate, choose
from kvloom.types.load import LevelLoad, ModelLoad, UnitLoad
from kvloom.types.service import Scale, UnitGroup

MOST: Final = {64: 10.0, 1000: 100.0}  # ms a period, by units
PERIODS: Final = 40
MODELS, BLOCKS, RUNNING = 20, 200_000, 32
BAND: Final = Thresholds(160, 260)


@dataclass(frozen=True, slots=True)
class Run:
    """Milliseconds a period, sorted; pairs and chosen requests, in the last one."""

    units: int
    times: list[float]
    pairs: int
    chosen: int

    @property
    def median(self) -> float:
        return self.times[len(self.times) // 2]


def model_load(draw: random.Random, used: int) -> ModelLoad:
    waiting = draw.choice((0, 0, 3))
    return ModelLoad(
        waiting=waiting,
        running=RUNNING // 3,
        used_blocks=used,
        cached_blocks=0,
        pinned_blocks=0,
        quota_blocks=BLOCKS // 3,
        begun_blocks=draw.choice((0, 256)),
        head_blocks=waiting and 1024,
        waiting_blocks=1024 * waiting,
        page_blocks=256,
        page_tokens=16,
        prompt_tokens_total=1 << 20,
        cached_tokens_total=1 << 20,
        received_tokens_total=0,
        output_tokens_total=1 << 20,
        preemptions_total=0,
        prefill_jobs_total=1 << 16,
        decode_jobs_total=1 << 16,
        levels=(LevelLoad(priority=-1, headroom=1600, running=1),) if draw.random() < 0.2 else (),
    )


def unit_load(draw: random.Random) -> UnitLoad:
    names = draw.sample(range(MODELS), draw.randint(2, 4))
    used = draw.randint(0, BLOCKS)
    return UnitLoad(
        total_blocks=BLOCKS,
        free_blocks=BLOCKS - used,
        block_bytes=16384,
        policy="adbs",
        models={f"model-{name}": model_load(draw, used // len(names)) for name in names},
        draining=draw.random() < 0.01,
    )


def candidates(draw: random.Random, load: UnitLoad) -> list[MigrationCandidate]:
    return [
        MigrationCandidate(f"r{number}", name, (draw.randint(1, 8000),), draw.randint(1, 1000))
        for name, model in load.models.items()
        for number in range(model.running)
    ]


def play(units: int, periods: int) -> Run:
    """Each period has reports of its own, and the pairs of the last."""
    draw = random.Random(units)
    groups = {
        f"group-{at}": UnitGroup(
            frozenset(f"unit-{number}" for number in range(at, min(at + 8, units))), Scale(1, 9)
        )
        for at in range(0, units, 8)
    }
    decoder, encode = msgspec.msgpack.Decoder(UnitLoad), msgspec.msgpack.encode
    last, times, chosen = Period(), [], 0
    for period in range(periods):
        fleet = {f"unit-{number}": unit_load(draw) for number in range(units)}
        running = {name: candidates(draw, load) for name, load in fleet.items()}
        bodies = {name: encode(load) for name, load in fleet.items()}
        began = time.process_time()
        loads = {name: decoder.decode(body) for name, body in bodies.items()}
        last = decide(loads, last, float(period), BAND, groups)
        gone = [choose(running[one.source], loads[one.destination], floor=BAND.out) for one in last.pairs]
        times.append(1e3 * (time.process_time() - began))
        chosen = len(gone) - gone.count(None)
    return Run(units, sorted(times), len(last.pairs), chosen)


def measure(units: Sequence[int] = tuple(MOST), periods: int = PERIODS) -> Report:
    machine = this_machine()
    runs = [play(count, periods) for count in units]
    return Report(
        name="fleet",
        title="A period of the fleet scheduler",
        columns=["units", "CPU ms, median", "CPU ms, longest", "pairs", "requests chosen"],
        rows=[_row(run) for run in runs],
        findings=[
            Finding(
                what=f"CPU a period, {run.units:,} units",
                value=run.median,
                unit=" ms",
                most=MOST.get(run.units),
            )
            for run in runs
        ],
        machine=machine,
    )


def _row(run: Run) -> list[Cell]:
    return [run.units, run.median, run.times[-1], run.pairs, run.chosen]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--units", type=int, nargs="+", default=sorted(MOST))
    publish(measure(parser.parse_args().units))


if __name__ == "__main__":
    main()
