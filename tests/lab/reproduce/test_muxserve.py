"""MuxServe's experiments at small scale: its set-up, its runtime, its systems, and what is measured."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace

from kvloom.lab.reproduce.muxserve.ablation import figure_3
from kvloom.lab.reproduce.muxserve.end_to_end import (
    ATTAINED,
    CHAT,
    CHAT_RATES,
    FIGURE_5,
    FIGURE_7,
    GPUS,
    SYNTHETIC,
    SYSTEMS,
    figure_5,
)
from kvloom.lab.reproduce.muxserve.setup import (
    ALONE,
    DEVICE,
    HOST,
    MUXSERVE,
    SCALES,
    SPATIAL,
    TEMPORAL,
    Load,
    Point,
    Served,
    System,
    falling,
    host_seconds,
    make_units,
    play_point,
    requests,
    served,
    together,
)
from kvloom.lab.reproduce.setup import Hosted, UnderMPS
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from tests.lab.reproduce.played import played, quiet

PAIR = (Served("7b", "7b", 2.0), Served("13b", "13b", 1.0))
LIGHT = Load(PAIR, 4, 8.0, after=40.0)


def test_published_numbers_are_whole() -> None:
    loads = [row for rows in FIGURE_5.values() for row in rows.values()]
    assert {len(row) for row in [*loads, *FIGURE_7.values(), *ATTAINED.values()]} == {len(SYSTEMS)}
    assert {len(parts) for rows in ATTAINED.values() for parts in rows} == {len(SCALES)}
    assert set(ATTAINED) < set(FIGURE_5)
    assert sum(CHAT_RATES) / len(CHAT) == pytest.approx(7.1, abs=0.05)


def test_rates_fall_by_a_power_law_and_20_percent_have_half_or_most() -> None:
    for alpha, part in ((0.9, 0.5), (2.1, 0.9)):
        rates = [model.rate for model in falling(SYNTHETIC, alpha, 20.0)]
        assert rates[0] == 20.0
        assert rates[9] == pytest.approx(20 * 10**-alpha)
        assert sum(rates[:4]) / sum(rates) == pytest.approx(part, abs=0.08)


def test_what_a_model_is_asked_depends_on_no_other() -> None:
    both, one = list(requests(PAIR, 50.0)), list(requests(PAIR[:1], 50.0))
    assert [ask.at for ask in both] == sorted(ask.at for ask in both)
    assert [ask for ask in both if ask.model == "7b"] == one
    assert Counter(ask.model for ask in requests(PAIR, 500.0))["7b"] == pytest.approx(1000, rel=0.1)


# -- the runtime ------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Roofline:
    return Roofline(find_device(DEVICE), 1, {"7b": find_shape("llama-7b")})


def test_a_decode_step_waits_for_the_host_by_its_batch(device: Roofline) -> None:
    cost = Hosted(device, host_seconds({"7b": "7b"}))
    for batch in (1, 64):
        step, prompt = Work.decode("7b", 1.0, [256] * batch), Work.prefill("7b", 1.0, [256] * batch)
        assert cost.seconds(step) == pytest.approx(device.seconds(step) + batch * HOST["7b"])
        assert cost.seconds(prompt) == device.seconds(prompt)


def test_under_mps_a_job_has_its_models_share_whatever_it_is_given(device: Roofline) -> None:
    (unit,) = make_units(System("one", together), PAIR[:1], 1)
    (model,) = unit.spec.models
    cost = UnderMPS(device, unit.spec)
    share = {Phase.PREFILL: model.prefill_share, Phase.DECODE: model.decode_share}
    for work in (Work.decode("7b", 1.0, [256] * 64), Work.prefill("7b", 0.1, [512])):
        fixed = replace(work, share=share[work.phase] or 1.0)
        assert cost.seconds(work) == device.seconds(fixed)
        assert cost.seconds(work, [work]) == device.seconds(fixed, [fixed])
    assert model.decode_share != 1.0


# -- the systems ------------------------------------------------------------------------------------------


def test_spatial_partitioning_has_the_papers_meshes() -> None:
    units = make_units(SPATIAL, falling(SYNTHETIC, 0.9, 20.0), GPUS)
    assert len(units) == len(SYNTHETIC) == sum(len(unit.spec.models) for unit in units)
    assert sum(ALONE[size] for size in SYNTHETIC) == GPUS
    assert {m.prefill_share for unit in units for m in unit.spec.models} == {1.0}


def test_temporal_multiplexing_has_muxserves_placement_and_whole_devices() -> None:
    here, there = (make_units(system, PAIR, 4) for system in (MUXSERVE, TEMPORAL))
    assert [list(unit.shapes) for unit in here] == [list(unit.shapes) for unit in there]
    assert [unit.spec.kv_bytes for unit in here] == [unit.spec.kv_bytes for unit in there]
    shares = {(m.prefill_share, m.decode_share) for unit in there for m in unit.spec.models}
    assert shares == {(1.0, 1.0)}


def test_fixed_quotas_have_room_for_as_many_tokens_of_each_model() -> None:
    (unit,) = make_units(System("fixed", together, quotas="fixed"), PAIR, 4)
    tokens = [(m.quota or 0.0) / unit.shapes[m.name].kv_bytes for m in unit.spec.models]
    assert tokens[0] == pytest.approx(tokens[1])
    assert sum(m.quota or 0.0 for m in unit.spec.models) == pytest.approx(1.0)


# -- a point ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def light() -> Point:
    return play_point(MUXSERVE, LIGHT, quiet)


def test_a_light_load_is_answered_in_time(light: Point) -> None:
    assert light.attained == {5: 1.0, 8: 1.0, 10: 1.0, 20: 1.0}
    assert light.total == pytest.approx(3.0, rel=0.5)
    rates = [model.rate for model in PAIR]
    expected = sum(r * light.throughput[m.name] for r, m in zip(rates, PAIR, strict=True)) / sum(rates)
    assert light.weighted(PAIR) == pytest.approx(expected)
    assert sum(light.blocks.values()) == pytest.approx(1.0)


def test_a_point_is_the_same_every_time(light: Point) -> None:
    told: list[float] = []
    assert play_point(MUXSERVE, LIGHT, told.append) == light
    assert told == sorted(told)
    assert 0.8 < told[-1] <= 1.0


def test_who_is_not_answered_in_time_does_not_count() -> None:
    """A single GPU is asked for ten times what it can answer."""
    flood = served(("7b",), (100.0,))
    point = play_point(SPATIAL, Load(flood, 1, 4.0, after=4.0), quiet)
    assert point.attained[5] < 0.5
    assert point.total < 20.0


# -- figures ----------------------------------------------------------------------------------------------


def test_figure_3_follows_the_papers_measurements() -> None:
    report = played(figure_3)
    assert {cell.verdict for cell in report.cells} <= {"agrees", "near"}
    assert [claim.verdict for claim in report.claims] == ["holds", "holds"]


def test_figure_5_in_small_has_its_cells_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.lab.reproduce.muxserve.end_to_end.SECONDS", {"small": 1.5})
    report = played(figure_5, least=0.9)
    (paper,) = (cell.paper for cell in report.cells if cell.column == "MuxServe over spatial")
    assert paper == pytest.approx(20.0 / 10.7)
    assert all(math.isfinite(cell.ours) and cell.paper is not None for cell in report.cells)
    assert len(report.claims) == 3
