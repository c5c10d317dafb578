"""The checker sees what a device with the wrong pages would read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvloom.kv.pool import Pool
from kvloom.lab.faults.invariants import InvariantChecker, lone_answer, next_token
from kvloom.types.geometry import Geometry
from kvloom.types.job import Job, PageCopy, Phase, SampleRow
from kvloom.types.request import SamplingParams, StartGenerate

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8, itemsize=4, block_bytes=256)  # 4 tokens a page
PROMPT = [11, 12, 13, 14, 15, 16]
PARAMS = SamplingParams(max_tokens=4, seed=3)


class Bench:
    """One sequence of one model, computed job by job."""

    def __init__(self) -> None:
        self.pool = Pool(40, {"m": GEOMETRY}, max_sequences=4, max_tokens={"m": 40})
        self.checker = InvariantChecker({"m": GEOMETRY}, 40, vocab=1000)
        self.cache = self.pool.caches["m"]
        self.cache.add_sequence(0)
        self.tokens = list(PROMPT)

    def step(self, new: int, spoil: Callable[[Job], None] = lambda job: None) -> list[int]:
        """The next `new` tokens of the sequence. spoil: between writing and reading."""
        start = self.cache.length(0)
        plan = self.cache.begin_forward([0], [new])
        prompt, output = np.array(self.tokens[:6]), np.array(self.tokens[6:], dtype=np.int64)
        sample = SampleRow(new - 1, 3, len(self.tokens) - 6, PARAMS, prompt, output)
        job = Job("m", Phase.PREFILL, 1, plan, np.array(self.tokens[start : start + new]), (sample,))
        self.checker.begin(job)
        for layer in range(2):
            self.checker.write(job, range(layer, layer + 1))
        spoil(job)
        drawn = self.checker.draw(job, 0)
        self.cache.end_forward(plan)
        self.tokens += drawn
        return drawn


def test_tokens_are_those_of_a_lone_answer() -> None:
    bench = Bench()
    bench.step(6)
    for _ in range(3):
        bench.step(1)
    body = StartGenerate(model="m", request="r", prompt=PROMPT, sampling=PARAMS)
    assert bench.tokens[6:] == lone_answer(body, 0, context=40, vocab=1000)
    assert lone_answer(body, 0, context=8, vocab=1000) == bench.tokens[6:8]
    assert not bench.checker.wrong


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("at", [0, 5])
def test_a_number_of_another_is_seen_in_whatever_layer_it_lies(layer: int, at: int) -> None:
    def spoil(job: Job) -> None:
        page = job.plan.tables[0, at // 4]
        bench.checker.arena[job.plan.page_map[page, layer, 1], at % 4] += 1

    bench = Bench()
    bench.step(6, spoil)
    assert bench.checker.wrong == ["m: sequence 0 reads what is not its own"]


def test_a_token_that_was_written_over_is_another_answer() -> None:
    """The same in all layers, as another sequence of the model would leave it."""

    def spoil(job: Job) -> None:
        bench.checker.arena[job.plan.page_map[job.plan.tables[0, 0]], 1] += 7

    bench = Bench()
    drawn = bench.step(6, spoil)
    tokens = [11, 19, *PROMPT[2:]]
    assert drawn == [next_token("m", tokens, 3, 0, PARAMS, 1000)]
    assert any("tokens that are not its own" in what for what in bench.checker.wrong)


def test_a_job_whose_write_is_lost_is_seen() -> None:
    def spoil(job: Job) -> None:
        bench.checker.arena[:] = 0

    bench = Bench()
    bench.step(6)
    bench.step(1, spoil)
    assert any("lost what it wrote" in what for what in bench.checker.wrong)


def test_copies_are_made_before_anything_is_written() -> None:
    bench = Bench()
    bench.step(6)
    bench.cache.fork_sequence(0, 1)
    plan = bench.cache.begin_forward([1], [1])
    [copy] = plan.copies
    assert isinstance(copy, PageCopy)
    job = Job("m", Phase.DECODE, 1, plan, np.array([99]), ())
    bench.checker.begin(job)
    bench.checker.write(job, range(2))
    assert bench.checker.read(job) == [[*PROMPT, 99]]
    source, target = plan.page_map[copy.source], plan.page_map[copy.target]
    assert (bench.checker.arena[source, 2] == -1).all()
    assert (bench.checker.arena[target, 3] == -1).all()
    assert not bench.checker.wrong


def test_two_units_agree_on_what_a_token_looks_like() -> None:
    """Whatever other models each has, for K and V go from one to the other."""
    one, two = (
        InvariantChecker({"m": GEOMETRY}, 4, 10),
        InvariantChecker({"a": GEOMETRY, "m": GEOMETRY}, 4, 10),
    )
    places = np.arange(3)
    assert (one.numbers("m", places, places) == two.numbers("m", places, places)).all()
    assert not (two.numbers("m", places, places) == two.numbers("a", places, places)).any()
