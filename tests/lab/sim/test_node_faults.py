"""Machines that are cut off or lose their power under requests, and controllers that die."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.lab.faults.chaos import Verdict, run_scenario
from kvloom.lab.faults.faults import ControllerLoss, Fault, FaultScenario, NodeOutage, Rates
from kvloom.lab.faults.host import FaultyHost
from kvloom.lab.faults.scenario import draw_scenario
from kvloom.lab.faults.simulation import Parts

LEASE = 1.0


def drawn() -> FaultScenario:
    """A seed's fleet on several machines, where nothing goes wrong and no client aborts."""
    scenario = next(
        one
        for one in map(draw_scenario, range(100))
        if len(one.nodes) > 2 and len(one.units) > 2 and all(client.aborts is None for client in one.clients)
    )
    return replace(scenario, faults=(), rates=Rates(), fleet_rates=Rates(), node_lease=LEASE)


def befallen(*faults: Fault, parts: Parts | None = None) -> Verdict:
    return run_scenario(replace(drawn(), faults=faults), journal=True, parts=parts)


def outage(seconds: float, *, off: bool = False, at: float = 0.02) -> list[Fault]:
    """An outage of each node, one after the other."""
    return [
        NodeOutage(at + i * (seconds + 0.1), (node.name,), seconds, off=off)
        for i, node in enumerate(drawn().nodes)
    ]


def has(verdict: Verdict, *words: str) -> int:
    return sum(all(word in line for word in words) for line in verdict.lines)


@pytest.mark.parametrize("part", [0.1, 0.9])
def test_a_cut_that_heals_within_the_lease_costs_no_engine_and_no_stream(part: float) -> None:
    verdict = befallen(*outage(part * LEASE))
    assert not verdict.broken
    assert verdict.counts["nodes cut off"] == len(drawn().nodes)
    assert verdict.counts["units started"] == len(drawn().units)
    assert not verdict.counts["requests failed"]
    assert not has(verdict, "has no lease any more")


def test_units_of_a_cut_beyond_the_lease_start_elsewhere_once_nothing_of_it_serves() -> None:
    verdict = befallen(*outage(3 * LEASE))
    assert not verdict.broken
    assert has(verdict, "has no lease any more") == len(drawn().nodes)
    assert verdict.counts["units started"] > len(drawn().units)


class Unfenced(FaultyHost):
    """Its engine serves on, whatever becomes of its node's lease."""

    def kill(self) -> None:
        if self.outage is None:
            super().kill()


def test_an_engine_that_serves_on_without_a_lease_is_found() -> None:
    verdict = befallen(*outage(3 * LEASE), parts=Parts(host=Unfenced))
    assert any("has two processes" in str(broken) for broken in verdict.broken)


def test_nodes_without_power_and_a_controller_that_dies_meanwhile() -> None:
    verdict = befallen(
        *outage(LEASE, off=True), ControllerLoss(0.03, 0.5 * LEASE), ControllerLoss(0.8, 3 * LEASE)
    )
    assert not verdict.broken
    assert (verdict.counts["nodes lost"], verdict.counts["controllers lost"]) == (len(drawn().nodes), 2)


def test_a_controller_that_comes_back_within_the_lease_ends_no_engine() -> None:
    verdict = befallen(ControllerLoss(0.01, 0.5 * LEASE))
    assert not verdict.broken
    assert verdict.counts["controllers lost"] == 1
    assert verdict.counts["units started"] == len(drawn().units)
    assert not verdict.counts["requests failed"]
