"""A model on a kind of mesh by itself (MuxServe, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.plan.cluster import CPU, MeshKind, Nodes, mesh_kinds
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import CostModel, Work
from kvloom.plan.estimate import CandidateCatalog, alone
from kvloom.plan.growth import BATCHES
from kvloom.plan.plan import pool_bytes, request_bytes
from kvloom.types.job import Phase
from tests.plan.clusters import Crowded, demand, formula, nodes, roofline

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
@pytest.mark.parametrize("kind", mesh_kinds([nodes("A100-80", 4)]))
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
