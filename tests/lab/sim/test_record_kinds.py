"""What befalls a fleet with faults is in its journal, each kind of record where it belongs."""

from __future__ import annotations

from collections import defaultdict

from kvloom.journal.records import (
    Added,
    Admitted,
    Awake,
    Died,
    Draining,
    Ended,
    HostChanged,
    Record,
    Removed,
    Woken,
)
from kvloom.lab.faults.chaos import run_quietly
from kvloom.lab.faults.faults import NodeOutage, UnitRemoved
from kvloom.lab.faults.scenario import draw_scenario

SEEDS = (8, 11, 17)


def test_what_befalls_components_is_told_of_them_with_its_reason() -> None:
    kinds: dict[type, list[Record]] = defaultdict(list)
    for seed in SEEDS:
        scenario = draw_scenario(seed)
        records = run_quietly(seed, journal=True).records
        told = {(type(one.event), one.component) for one in records}
        for fault in scenario.faults:
            if isinstance(fault, UnitRemoved):
                assert {(Removed, fault.unit), (Ended, fault.unit)} <= told
            if isinstance(fault, NodeOutage):
                assert {(HostChanged, node) for node in fault.nodes} <= told
        woken = {one.component for one in records if isinstance(one.event, Woken)}
        assert {one.component for one in records if isinstance(one.event, Awake)} <= woken
        for one in records:
            kinds[type(one.event)].append(one)
            assert one.component
            assert getattr(one.event, "reason", "said") != ""
    wanted = {Added, Admitted, Awake, Died, Draining, Ended, HostChanged, Removed}
    assert wanted - kinds.keys() == set()
    assert all(isinstance(one.event, Awake) and one.event.seconds >= 0 for one in kinds[Awake])
