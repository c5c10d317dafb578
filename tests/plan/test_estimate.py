"""A model on a kind of mesh by itself (MuxServe, algorithm 2), and what a unit answers (equation 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.reproduce.muxserve.setup import multiplexed
from kvloom.plan.cluster import CPU, Costs, MeshKind, Nodes, mesh_kinds
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.estimate import CandidateCatalog, Estimator, alone
from kvloom.plan.growth import AMPLE, BATCHES
from kvloom.plan.plan import pool_bytes, request_bytes
from kvloom.types.job import Phase
from tests.plan.clusters import Crowded, demand, formula, nodes, roofline

ONE, FOUR = (nodes("A100-80", 4).mesh(n) for n in (1, 4))
MULTIPLEXED = replace(nodes("A100-80", 4), abilities=multiplexed)  # the paper's, whose ranks share compute
SHAPES = ("llama-7b", "llama-13b", "llama3-8b")

wanted = st.lists(st.tuples(st.sampled_from(SHAPES), st.floats(0.05, 20)), min_size=2, max_size=4)


def estimator_of(pairs: list[tuple[str, float]], costs: Costs = roofline) -> Estimator:
    return Estimator([demand(f"m{n}", shape, rate) for n, (shape, rate) in enumerate(pairs)], costs)


def test_equation_3_by_hand() -> None:
    """Far beyond what can be answered, so that both batches are as large as they may be. With each step 26
    sequences of the first end, and 13 of the second: so many prompts are a job."""
    estimator = Estimator(
        [demand("a", "llama-7b", 1000.0, 50, 10), demand("b", "llama-7b", 1000.0, 100, 20)], formula
    )
    found = estimator.known(ONE, frozenset({estimator.item(0, 1), estimator.item(1, 1)}))
    step = 0.01 + 256 / (10_000 * 0.9)
    prefills = sum(256 / n * (0.01 + n * prompt / 10_000) for n, prompt in ((26, 50), (13, 100)))
    assert found.throughput == pytest.approx((256 / (prefills + 10 * step), 256 / (prefills + 20 * step)))
    assert found.answered == pytest.approx(sum(found.throughput))
    assert found.bound == "compute"


@settings(deadline=None, max_examples=60)
@given(wanted)
def test_company_never_helps(pairs: list[tuple[str, float]]) -> None:
    estimator = estimator_of(pairs)
    items = [estimator.item(n, 1) for n in range(len(pairs))]
    alone = [estimator.unit(FOUR, frozenset({item})) for item in items]
    together = estimator.unit(FOUR, frozenset(items))
    assert all(alone)
    if together is not None:
        assert together.answered <= sum(one.answered for one in alone if one) * (1 + 1e-9)
        assert (together.level >= 1.0) == (together.bound == "")
        assert together.answered <= sum(rate for _, rate in pairs) * (1 + 1e-9)


def test_decodes_that_take_turns_take_each_others_time() -> None:
    easy, turns = (
        estimator_of([("llama-7b", 3.0)] * 3, costs)
        for costs in (formula, lambda device, gpus, shapes: Crowded())
    )
    items = frozenset(easy.item(n, 1) for n in range(3))
    assert {turns.item(n, 1) for n in range(3)} == items
    assert easy.known(ONE, items).level > 1.5 * turns.known(ONE, items).level


def test_a_unit_without_models_and_one_that_does_not_fit() -> None:
    estimator = estimator_of([("llama-13b", 1.0)] * 3)
    items = [estimator.item(n, 1) for n in range(3)]
    assert estimator.known(ONE, frozenset()).level == AMPLE
    assert estimator.unit(ONE, frozenset(items[:2])) is not None
    assert estimator.unit(ONE, frozenset(items)) is None  # 78 GB of weights
    assert estimator.unit(FOUR, frozenset(items)) is not None


def test_units_are_estimated_once() -> None:
    told: list[int] = []
    estimator = Estimator([demand("a", "llama-7b", 1.0)], roofline, told.append)
    for replicas in range(1, 600):
        for _ in range(2):
            estimator.unit(ONE, frozenset({estimator.item(0, replicas)}))
    assert estimator.evaluations == 599
    assert told == [256, 512]


def test_replicas_share_the_rate() -> None:
    estimator = estimator_of([("llama-7b", 12.0)])
    third = estimator.item(0, 3)
    assert estimator.item(0, 3) == third != estimator.item(0, 1)
    assert (estimator.demand(third), estimator.rate(third)) == (0, 4.0)
    assert estimator.rate(estimator.split(third, 2)) == 2.0


def test_shares_grow_until_they_answer_the_demand_together() -> None:
    estimator = estimator_of([("llama-7b", 5.0), ("llama-7b", 5.0), ("llama-7b", 0.1)])
    items = [estimator.item(n, 1) for n in range(3)]
    four = MULTIPLEXED.mesh(4)
    few, all_three = estimator.settled(four, items[2:]), estimator.settled(four, items)
    assert few[0].share == 0.3
    assert all(0.3 <= one.share <= 0.9 for one in all_three)
    crowd = estimator_of([("llama-7b", 100.0)] * 3)
    assert [one.share for one in crowd.settled(ONE, [crowd.item(n, 1) for n in range(2)])] == [0.9, 0.9]


def test_memory_without_end() -> None:
    estimator = estimator_of([("llama-13b", 5.6)])
    items = [estimator.item(0, 1)]
    assert estimator.known(ONE, frozenset(items)).bound == "memory"
    endless = estimator.unbounded(ONE, items)
    assert endless.level >= 1.0
    assert endless.used > estimator.pool(ONE, items)


# MuxServe's figure 3: seconds of a 7B's prefill of 128 tokens, by SM share (their notebooks)
FIGURE_3 = {0.3: 30.4, 0.4: 27.7, 0.5: 21.3, 0.6: 17.6, 0.7: 17.2, 0.8: 16.5, 0.9: 16.4, 1.0: 16.0}


@given(
    st.integers(1, len(BATCHES)),
    st.floats(0.001, 20),
    st.floats(0.01, 10),
    st.floats(0, 0.5),
    st.floats(0.01, 100),
)
def test_the_smallest_batch_that_answers(
    cap: int, rate: float, fixed: float, each: float, serial: float
) -> None:
    prefill, decode = [serial * b / 100 for b in BATCHES], [fixed + each * b for b in BATCHES]
    at, throughput = alone(prefill, decode, cap, rate)
    answers = [b / (p + d) for b, p, d in zip(BATCHES, prefill, decode, strict=True)][:cap]
    enough = [n for n, answered in enumerate(answers) if answered >= rate]
    assert at == (enough[0] if enough else cap - 1)
    assert throughput == answers[at]


@pytest.mark.parametrize("rate", [0.5, 2.0, 6.0, 9.0, 50.0])
@pytest.mark.parametrize("kind", mesh_kinds([MULTIPLEXED]))
def test_the_smallest_share_that_answers(kind: MeshKind, rate: float) -> None:
    wanted = demand("a", "llama-7b", rate)
    catalog = CandidateCatalog([wanted], roofline)
    found = catalog.candidate(kind, wanted, rate)
    assert found is not None
    cap = sum(b * request_bytes(wanted, kind) <= pool_bytes(kind, [wanted.shape]) for b in BATCHES)
    shares = [share for share in kind.shares if share <= 0.9]
    answers = {
        s: alone(found.prefill, catalog.decoding(kind, wanted, s).seconds, cap, rate)[1] for s in shares
    }
    enough = [share for share in shares if answers[share] >= rate]
    assert found.lean.share == (enough[0] if enough else 0.9)
    assert found.full.share == 0.9
    assert (found.throughput >= rate) == bool(enough)


def test_prefill_takes_the_smallest_share_that_is_as_fast_as_all() -> None:
    class Measured:
        def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
            return FIGURE_3[round(work.share, 1)] if work.phase is Phase.PREFILL else 12.0

    def costs(device: str, gpus: int, shapes: Mapping[str, ModelShape]) -> CostModel:
        return Measured()

    wanted = demand("a", "llama-7b", 1.0)
    found = CandidateCatalog([wanted], costs).candidate(nodes("A100-80", 1).mesh(1), wanted, 1.0)
    assert found is not None
    assert found.prefill_share == 0.8  # what MuxServe gives a 7B


def test_meshes_that_cannot_hold_it() -> None:
    large, odd = demand("a", "llama-65b", 1.0), demand("b", "llama-30b", 1.0)
    catalog = CandidateCatalog([large, odd], formula)
    kinds = mesh_kinds([nodes("A100-80", 8)])
    assert [kind.gpus for kind in kinds if catalog.candidate(kind, large, 1.0)] == [
        2,
        4,
        8,
    ]  # 130 GB of weights
    assert [kind.gpus for kind in kinds if catalog.candidate(kind, odd, 1.0)] == [1, 2, 4]  # 52 heads
    assert catalog.candidate(nodes("A100-80", 3).mesh(3), odd, 1.0) is None
    cores = Nodes(CPU, 80 << 30, 3, 1)
    assert catalog.candidate(cores.mesh(3), odd, 1.0) is not None  # threads split no head
    assert cores.mesh(3).shares == (1 / 3, 2 / 3, 1.0)


def test_jobs_of_several_gpus_take_turns_on_all_of_them() -> None:
    wanted = demand("a", "llama-7b", 1.0)
    catalog = CandidateCatalog([wanted], roofline)
    found = catalog.candidate(FOUR, wanted, 1.0)
    assert found is not None
    assert (FOUR.shares, found.prefill_share, found.lean.share, found.full.share) == ((1.0,), 1.0, 1.0, 1.0)
    assert found.full.occupied == (1.0,) * len(BATCHES)


def test_ranks_share_kv_heads_evenly() -> None:
    eight = demand("a", "llama3-8b", 1.0)  # 8 KV heads of 32
    catalog = CandidateCatalog([eight], formula)
    kinds = mesh_kinds([nodes("A100-80", 16)])
    assert [kind.gpus for kind in kinds if catalog.candidate(kind, eight, 1.0)] == [1, 2, 4, 8]


def test_what_decodes_occupy_is_what_a_crowd_of_them_takes() -> None:
    wanted, kind = demand("a", "llama-7b", 1.0), nodes("A100-80", 1).mesh(1)
    easy = CandidateCatalog([wanted], formula).decoding(kind, wanted, 0.5)
    assert easy.occupied == pytest.approx([1 / 8] * len(BATCHES))
    turns = CandidateCatalog([wanted], lambda device, gpus, shapes: Crowded()).decoding(kind, wanted, 0.5)
    assert turns.occupied == pytest.approx([1.0] * len(BATCHES))
    real = CandidateCatalog([wanted], roofline).decoding(kind, wanted, 0.9)
    assert 1 / 8 < real.occupied[0] < real.occupied[-1] <= 1.0  # more K and V to read a step
    assert list(real.occupied) == sorted(real.occupied)
    assert easy.seconds == pytest.approx([338 * (0.01 + b / 5000) for b in BATCHES])


def test_prompts_come_as_sequences_end() -> None:
    """256 sequences of 64 tokens: four end at each step, and four prompts of 100 tokens are a job; of the
    smallest batches each prompt is one."""
    wanted, kind = demand("a", "llama-7b", 1.0, 100, 64), nodes("A100-80", 1).mesh(1)
    found = CandidateCatalog([wanted], formula).candidate(kind, wanted, 1.0)
    assert found is not None
    assert found.prefill[-1] == pytest.approx(64 * (0.01 + 400 / (10_000 * found.prefill_share)))
    assert found.prefill[0] == pytest.approx(0.01 + 100 / (10_000 * found.prefill_share))
    assert found.prefill[7] == pytest.approx(8 * found.prefill[0])


def test_costs_are_asked_about_each_job_once() -> None:
    asked: list[Work] = []

    class Counted(Crowded):
        def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
            asked.append(work)
            return super().seconds(work, beside)

    wanted, kind = demand("a", "llama-7b", 1.0), nodes("A100-80", 1).mesh(1)
    catalog = CandidateCatalog([wanted], lambda device, gpus, shapes: Counted())
    for rate in (0.1, 0.5, 1.0, 2.0, 4.0):
        catalog.candidate(kind, wanted, rate)
    shares = len(kind.shares)
    prompts, probes = 2048 // 161, 4
    assert len(asked) <= shares + prompts + shares * (len(BATCHES) + probes)
