"""A program that is set while serving is on probation, over any process's and any controller's end."""

from __future__ import annotations

import logging
import random

import pytest

from kvloom.cluster.controller import Controller
from kvloom.cluster.edits import Edit
from kvloom.cluster.launcher import Answered, Change, Ended, Missed, News
from kvloom.cluster.mirror import Mirror
from kvloom.cluster.state import FleetSpec
from kvloom.types.spec import ProgramSpec
from tests.cluster.histories import TIMING, Memory, ModelledHost, StillClock

OWN, WILD, OTHER = (ProgramSpec(name) for name in ("own", "wild", "other"))
SPEC = FleetSpec(program=OWN, proven=OWN)
HANGS = "did not answer any more and was killed"


class Fleet:
    """A controller, whose gateway serves, on a clock that stands still."""

    def __init__(self) -> None:
        self.clock, self.store, self.host = StillClock(), Memory(), ModelledHost(random.Random(0))
        self.begin()
        self.answer("gateway/1")

    def begin(self) -> None:
        """Starts a controller, the first one or one after another."""
        self.controller = Controller(SPEC, self.host, self.clock, store=self.store, timing=TIMING)
        self.controller.step()

    @property
    def spec(self) -> FleetSpec:
        return self.controller.spec

    def answer(self, gateway: str) -> None:
        self.host.there[gateway].phase = "ready"
        self.controller.hear(Answered(gateway))
        self.controller.step()

    def end(self, gateway: str, how: str = "ended with exit code 1") -> None:
        del self.host.there[gateway]
        self.controller.hear(Ended(gateway, how))
        self.controller.step()

    def set(self, program: ProgramSpec) -> None:
        self.controller.edit(Edit(program=program))
        self.controller.step()

    def after(self, seconds: float) -> None:
        self.clock.time += seconds
        self.controller.step()


def test_a_gateway_that_dies_soon_takes_its_program_along(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.after(30.0)
    with caplog.at_level(logging.WARNING):
        fleet.end("gateway/1")
    assert (fleet.spec.program, fleet.spec.proven) == (OWN, OWN)
    assert fleet.spec.reverted is not None
    assert (fleet.spec.reverted.program, fleet.spec.reverted.problem) == (WILD, "ended with exit code 1")
    assert "less than a minute after the program wild was set: own runs again" in caplog.text
    fleet.after(0.5)
    assert fleet.host.there["gateway/1"].phase == "starting"
    fleet.set(OTHER)
    assert (fleet.spec.program, fleet.spec.proven) == (OTHER, OWN)
    assert fleet.controller.snapshot.spec.reverted is None


def test_a_gateway_that_hangs_soon_does_too() -> None:
    """The hang begins within the minute, and is known after it."""
    fleet = Fleet()
    fleet.set(WILD)
    fleet.after(69.0)
    fleet.controller.hear(Missed("gateway/1", 1))
    for misses in (2, 3):
        fleet.after(10.0)
        fleet.controller.hear(Missed("gateway/1", misses))
    fleet.controller.step()
    assert fleet.spec.program == WILD
    fleet.end("gateway/1")
    assert fleet.spec.program == OWN
    assert fleet.spec.reverted is not None
    assert fleet.spec.reverted.problem == HANGS


def test_a_program_that_lives_for_a_minute_stays() -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.after(70.0)
    assert fleet.spec.proven == WILD
    fleet.end("gateway/1")
    assert (fleet.spec.program, fleet.spec.reverted) == (WILD, None)


def test_the_last_one_that_lived_comes_back_if_two_were_set() -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.after(50.0)
    fleet.set(OTHER)
    fleet.after(50.0)
    assert fleet.spec.proven == OWN
    fleet.end("gateway/1")
    assert fleet.spec.program == OWN


def test_one_that_is_taken_back_is_on_no_probation() -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.set(OWN)
    fleet.end("gateway/1")
    assert (fleet.spec.program, fleet.spec.reverted) == (OWN, None)


def test_another_controller_goes_on_with_the_probation() -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.after(50.0)
    fleet.begin()
    fleet.after(50.0)
    assert fleet.spec.proven == OWN
    fleet.end("gateway/1")
    assert fleet.spec.program == OWN


def test_a_gateway_that_began_with_the_other_program_meanwhile_is_replaced() -> None:
    fleet = Fleet()
    fleet.set(WILD)
    fleet.controller.edit(Edit(gateway=True))
    fleet.after(0.0)
    fleet.end("gateway/1")
    assert (fleet.spec.program, fleet.spec.gateway) == (OWN, 3)
    assert fleet.host.there["gateway/3"].phase == "starting"


def test_gateways_are_told_that_it_has_failed() -> None:
    fleet = Fleet()
    mirror = Mirror(fleet.controller.snapshot, lambda _: None)
    told: list[Change] = []

    def tell(component: str, news: News) -> None:
        if isinstance(news, Change):
            told.append(news)

    fleet.host.tell = tell  # type: ignore[method-assign]
    fleet.set(WILD)
    fleet.controller.edit(Edit(gateway=True))
    fleet.after(0.0)
    fleet.answer("gateway/2")
    fleet.end("gateway/1")  # It retires, which is no failure.
    assert fleet.spec.program == WILD
    fleet.controller.edit(Edit(gateway=True))
    fleet.after(0.0)
    fleet.end("gateway/3")
    for change in told:
        mirror.heed(change)
    assert mirror.spec.program == OWN
    assert mirror.spec.reverted == fleet.spec.reverted
    assert mirror.spec.reverted is not None
