"""MuxServe's experiments at small scale: its set-up, its runtime, its systems, and what is measured."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from kvloom.lab.reproduce.muxserve.ablation import PARTS, figure_3
from kvloom.lab.reproduce.muxserve.end_to_end import (
    ATTAINED,
    CHAT,
    CHAT_RATES,
    CHAT_SPATIAL,
    CHAT_TOKENS,
    FIGURE_5,
    FIGURE_7,
    GPUS,
    SYNTHETIC,
    SYSTEMS,
    chat,
    figure_5,
)
from kvloom.lab.reproduce.muxserve.points import SCALES, Point, play_point
from kvloom.lab.reproduce.muxserve.setup import (
    ALONE,
    CHATLMSYS,
    DEVICE,
    Load,
    Served,
    falling,
    served,
)
from kvloom.lab.reproduce.muxserve.systems import (
    CHAT_PARTS,
    HALF,
    HOST,
    KVLOOM,
    MUXSERVE,
    PREFILLS,
    SPATIAL,
    TEMPORAL,
    Rooms,
    System,
    host_seconds,
    make_units,
    together,
)
from kvloom.lab.reproduce.setup import Hosted, UnderMPS
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase
from kvloom.types.spec import DEFAULT_POLICY
from tests.lab.reproduce.played import played, quiet

PAIR = (Served("7b", "7b", 2.0), Served("13b", "13b", 1.0))
LIGHT = Load(PAIR, 4, 8.0)


def test_published_numbers_are_whole() -> None:
    loads = [row for rows in FIGURE_5.values() for row in rows.values()]
    assert {len(row) for row in [*loads, *FIGURE_7.values(), *ATTAINED.values()]} == {len(SYSTEMS)}
    assert {len(parts) for rows in ATTAINED.values() for parts in rows} == {len(SCALES)}
    assert set(ATTAINED) < set(FIGURE_5)
    assert sum(CHAT_RATES) / len(CHAT) == pytest.approx(7.1, abs=0.05)
    whole = CHATLMSYS.mean_prompt + CHATLMSYS.mean_output
    mean = sum(rate * tokens for rate, tokens in zip(CHAT_RATES, CHAT_TOKENS, strict=True)) / sum(CHAT_RATES)
    assert mean == pytest.approx(whole, rel=0.1)


def test_every_rate_of_figure_7_has_the_same_requests() -> None:
    counts = [Counter(ask.model for ask in chat(average).requests()) for average in (3.0, 7.1, 11.9)]
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0].values()) == pytest.approx(4089, abs=17)  # of the results that were published
    assert counts[0]["11-30b"] == pytest.approx(533, abs=2)
    assert sorted(CHAT) == sorted(("7b",) * 4 + ("13b",) * 6 + ("30b",) * 3 + ("65b",) * 3)


def test_rates_fall_by_a_power_law_and_20_percent_have_half_or_most() -> None:
    for alpha, part in ((0.9, 0.5), (2.1, 0.9)):
        rates = [model.rate for model in falling(SYNTHETIC, alpha, 20.0)]
        assert rates[0] == 20.0
        assert rates[9] == pytest.approx(20 * 10**-alpha)
        assert sum(rates[:4]) / sum(rates) == pytest.approx(part, abs=0.08)


def test_what_a_model_is_asked_depends_on_no_other() -> None:
    both, one = (list(Load(models, 4, 50.0).requests()) for models in (PAIR, PAIR[:1]))
    assert [ask.at for ask in both] == sorted(ask.at for ask in both)
    assert [ask for ask in both if ask.model == "7b"] == one
    assert Counter(ask.model for ask in Load(PAIR, 4, 500.0).requests())["7b"] == pytest.approx(1000, rel=0.1)


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
        fixed = structs.replace(work, share=share[work.phase] or 1.0)
        assert cost.seconds(work) == device.seconds(fixed)
        assert cost.seconds(work, [work]) == device.seconds(fixed, [fixed])
    assert model.decode_share != 1.0


# -- the systems ------------------------------------------------------------------------------------------


def test_spatial_partitioning_has_the_papers_meshes_and_pools() -> None:
    units = make_units(SPATIAL, falling(SYNTHETIC, 0.9, 20.0), GPUS)
    assert len(units) == len(SYNTHETIC) == sum(len(unit.spec.models) for unit in units)
    assert sum(ALONE[size] for size in SYNTHETIC) == GPUS
    assert {m.prefill_share for unit in units for m in unit.spec.models} == {1.0}
    assert {unit.spec.kv_bytes / unit.spec.tensor_parallel for unit in units} == {80e9 * HALF["7b"]}
    real = make_units(CHAT_SPATIAL, chat(3.0).models, GPUS)
    gpus = {unit.spec.models[0].name: unit.spec.tensor_parallel for unit in real}
    assert sum(gpus.values()) == GPUS
    assert (gpus["1-13b"], gpus["2-13b"], gpus["16-65b"]) == (1, 2, 4)
    pools = {unit.spec.models[0].name: unit.spec.kv_bytes for unit in real}
    assert pools["16-65b"] == pytest.approx(4 * 80e9 * CHAT_PARTS["65b"])


def test_published_pools_are_those_of_the_published_configurations() -> None:
    """65B, 13B and 7B on four GPUs have 0.10875 of the memory there, and 7B and 13B on two 0.51."""
    for sizes, gpus, part in ((("65b", "13b", "7b"), 4, 0.10875), (("7b", "13b"), 2, 0.51)):
        (unit,) = make_units(replace(MUXSERVE, place=together), served(sizes, (1.0,) * len(sizes)), gpus)
        assert unit.spec.kv_bytes == pytest.approx(part * 80e9 * gpus, rel=1e-6)


def test_temporal_multiplexing_has_muxserves_placement_and_whole_devices() -> None:
    here, there = (make_units(system, PAIR, 4) for system in (MUXSERVE, TEMPORAL))
    assert [list(unit.shapes) for unit in here] == [list(unit.shapes) for unit in there]
    assert [unit.spec.kv_bytes for unit in here] == [unit.spec.kv_bytes for unit in there]
    shares = {(m.prefill_share, m.decode_share) for unit in there for m in unit.spec.models}
    assert shares == {(1.0, 1.0)}
    launched = {m.name: m.prefill_share for unit in here for m in unit.spec.models}
    assert launched == {"7b": PREFILLS["7b"], "13b": PREFILLS["13b"]}


def test_what_is_published_runs_as_published_and_kvloom_as_it_is() -> None:
    assert [system.policy for system in SYSTEMS] == ["vllm-2023", "vllm-2023", "adbs-2024"]
    assert KVLOOM.policy == DEFAULT_POLICY


def test_equal_rooms_hold_as_many_tokens_of_each_model() -> None:
    (unit,) = make_units(PARTS, PAIR, 4)
    tokens = [(m.quota or 0.0) / unit.shapes[m.name].kv_bytes for m in unit.spec.models]
    assert tokens[0] == pytest.approx(tokens[1])


ROOMS: tuple[Rooms, ...] = ("by rate", "by rate and length")


def test_rooms_by_length_are_smaller_where_sequences_are_longer() -> None:
    """A bound counts 416 tokens for each sequence: of 832 tokens it lets in half as many, if it is told."""
    longer = (replace(PAIR[0], lengths=PAIR[0].lengths.scaled(416, 416)), PAIR[1])
    by_rate, told = (
        make_units(replace(MUXSERVE, place=together, rooms=rooms), longer, 4)[0].spec.models[0].quota or 0.0
        for rooms in ROOMS
    )
    assert told == pytest.approx(by_rate / 2)


# -- a point ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def light() -> Point:
    return play_point(MUXSERVE, LIGHT, quiet)


def test_a_light_load_is_answered_in_time(light: Point) -> None:
    assert light.attained == {5: 1.0, 8: 1.0, 10: 1.0, 20: 1.0}
    assert 0.5 < light.total < 3.0  # until the last has ended
    rates = [model.rate for model in PAIR]
    assert all(0.0 < times.ttft < times.ttft_tail < 1.0 for times in light.times.values())
    expected = sum(r * light.throughput[m.name] for r, m in zip(rates, PAIR, strict=True)) / sum(rates)
    assert light.weighted(PAIR) == pytest.approx(expected)
    assert sum(light.blocks.values()) == pytest.approx(1.0)


def test_a_point_is_the_same_every_time(light: Point) -> None:
    told: list[float] = []
    assert play_point(MUXSERVE, LIGHT, told.append) == light
    assert told == sorted(told)
    assert 0.8 < told[-1] <= 1.0


def test_throughput_is_by_the_end_of_the_last_and_attainment_by_all() -> None:
    """A single GPU is asked for ten times what it can answer."""
    flood = Load(served(("7b",), (100.0,)), 1, 2.0, counted=True)
    point = play_point(SPATIAL, flood, quiet)
    assert point.attained[5] < point.attained[20] <= 1.0
    assert point.total < 20.0
    assert 200 / point.total > point.tails[2] > point.tails[0]
    assert point.times["1-7b"].batch > 50


# -- figures ----------------------------------------------------------------------------------------------


def test_figure_3_follows_the_papers_measurements() -> None:
    report = played(figure_3)
    assert {cell.verdict for cell in report.cells} <= {"agrees", "near"}
    assert [claim.verdict for claim in report.claims] == ["holds", "holds"]


def test_figure_5_in_small_has_its_cells_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.lab.reproduce.muxserve.end_to_end.SECONDS", {"small": 1.0})
    report = played(figure_5, least=0.9)
    (paper,) = (cell.paper for cell in report.cells if cell.column == "MuxServe over spatial")
    assert paper == pytest.approx(20.0 / 10.7)
    assert all(math.isfinite(cell.ours) for cell in report.cells)
    assert {cell.column for cell in report.cells if cell.paper is None} == {"kvloom", "kvloom over MuxServe"}
    assert len(report.claims) == 4
    assert [row[1] for row in report.grids[0].rows] == ["spatial", "temporal", "MuxServe", "kvloom"]
