"""Drawn workloads: the default policy is the best over a cheap part of them, and equation 3 is no dream."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.lab.reproduce.muxserve.drawn import (
    LOADS,
    MEMORIES,
    NOISE,
    PHASES,
    POLICIES,
    REQUESTS,
    Found,
    Score,
    crowd,
    draw,
    foretold,
    play_policies,
    scores,
    workloads,
)
from kvloom.types.spec import DEFAULT_POLICY
from tests.lab.reproduce.played import played, quiet


def test_each_kind_of_workload_is_drawn_once_and_alike_every_time() -> None:
    drawn = workloads("full")
    assert len({(one.memory, one.load, one.phases) for one in drawn}) == len(drawn) == 18
    assert drawn == workloads("full")
    assert all(one in drawn for one in workloads("small"))
    light, heavy = (draw("ample", load, "alike", 3) for load in ("light", "overload"))
    assert light.lasting(100) > 1.5 * heavy.lasting(100)
    assert set(MEMORIES) == {one.memory for one in drawn}
    assert set(LOADS) == {one.load for one in drawn}
    assert set(PHASES) == {one.phases for one in drawn}


@pytest.fixture(scope="module")
def found() -> Found:
    return play_policies(workloads("small"), POLICIES, lambda one: one.lasting(REQUESTS["small"]), quiet)


def test_the_default_policy_is_the_best_or_within_noise_of_it(found: Found) -> None:
    some = scores(found, range(len(workloads("small"))))
    print({policy: (round(score.in_time, 3), round(score.throughput, 3)) for policy, score in some.items()})
    assert some[DEFAULT_POLICY].in_time >= max(score.in_time for score in some.values()) - NOISE
    assert some[DEFAULT_POLICY].throughput > 0.9


def test_scores_are_means_over_the_workloads_that_are_named(found: Found) -> None:
    first = scores(found, [0])
    assert first["fcfs"].in_time == found["fcfs"][0].attained[8]
    assert max(score.throughput for score in first.values()) == 1.0
    assert isinstance(first["adbs"], Score)


def test_a_flood_is_of_one_model_and_nobody_planned_it() -> None:
    both = crowd()
    greedy, modest = (model.rate for model in both.models)
    assert greedy == pytest.approx(30 * modest)
    assert len({model.rate for model in both.planned}) == 1
    point = replace(both, models=both.models[1:]).play("adbs", 3.0, quiet)
    assert point.attained[8] == 1.0


def test_what_equation_3_foretells_is_compared_in_small() -> None:
    report = played(foretold, least=0.9)
    assert report.cells[0].ours == pytest.approx(1.0, abs=0.5)
    assert [row[1] for row in report.grids[0].rows] == ["1", "1", "1"]
