"""Room to grow keeps what runs from being preempted again and again."""

from __future__ import annotations

import pytest

from kvloom.engine.batching.view import ModelView
from kvloom.lab.reproduce.llumnix.point import Point, play_point, units_of
from kvloom.lab.reproduce.llumnix.systems import OWN_INFAAS
from kvloom.lab.reproduce.llumnix.traffic import SHAREGPT


def near_the_limit() -> Point:
    """An instance that has a little more to do than its memory is for."""
    return play_point(OWN_INFAAS, units_of(OWN_INFAAS, 1), SHAREGPT.requests(0.7, 90), lambda _: None)


def test_fewer_give_way_near_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = near_the_limit()
    monkeypatch.setattr(ModelView, "growth", property(lambda _: 0))
    assert kept.preemptions < 0.8 * near_the_limit().preemptions
