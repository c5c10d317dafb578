"""The journal of fleets in virtual time: it tells what the counters count."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvloom.engine.engine import Engine
from kvloom.journal.records import Moved, Preempted, Record, Stayed
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.journal import Journal
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import FaultSimulation, Parts
from kvloom.lab.sim.virtual_time import LoopClock, run_virtual

SEEDS = (3, 5, 21, 33, 48, 60)


def test_the_journal_of_a_run_with_faults_tells_what_the_counters_count() -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        counted, records = run_virtual(played(seed), seed=seed)
        told = Counter[str]()
        for record in records:
            if isinstance(record.event, Moved | Stayed | Preempted):
                told[str(record.event.__struct_config__.tag)] += 1
                assert record.event.reason
        assert told == +counted, seed
        total += told
    assert min(total["moved"], total["preempted"]) > 0, total


async def played(seed: int) -> tuple[Counter[str], list[Record]]:
    engines: list[Engine] = []

    class Host(FaultyHost):
        """It remembers all engines that it ever had."""

        def start(self) -> None:
            super().start()
            assert self.process is not None
            engines.append(self.process.engine)

    clock = LoopClock(asyncio.get_running_loop())
    lines = Journal(clock, kept=False)
    simulation = FaultSimulation(draw_scenario(seed), clock, lines, Parts(host=Host))
    await simulation.start()
    await simulation.play(600.0)
    simulation.calm()
    await simulation.close()
    counted = Counter(moved=lines.counts["moved by pairs"])
    for engine in engines:
        load = await engine.load()
        counted["preempted"] += sum(model.preemptions_total for model in load.models.values())
    records = simulation.records.since(0)
    refused = sum(isinstance(record.event, Stayed) for record in records)
    assert refused <= lines.counts["moves refused"]  # those that an order has refused are not the fleet's
    counted["stayed"] = refused
    assert simulation.records.first == 0
    return counted, records
