"""The jobs that are measured: they fit the engine, are what they are said to be, and leave no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.lab.profile.beside import (
    MAX_OVERSUBSCRIBED,
    MAX_PAIRS,
    measure_pair,
    pairs,
    settings_beside_others,
    some_of,
)
from kvloom.lab.profile.jobs import (
    PROMPT,
    JobRunner,
    Limits,
    Setting,
    WatchedExecutor,
    core_counts,
    decode,
    grid,
    measure_prefill_gap,
    measure_step,
    prefill,
)
from kvloom.plan.cost.profile import MeasuredJob
from kvloom.plan.cost.work import Work
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.spec import ModelSpec, Slo
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of

ROOMY = Limits(context=4096, page=32, tokens=1 << 20, chunk=512, batch=256)

limits = st.builds(
    Limits,
    context=st.integers(32, 8192),
    page=st.integers(1, 64),
    tokens=st.integers(128, 1 << 20),
    chunk=st.integers(8, 2048),
    batch=st.integers(1, 512),
)


@given(limits, st.integers(1, 64), st.booleans())
def test_a_job_is_one_that_the_engine_could_make(limits: Limits, cores: int, quick: bool) -> None:
    found = grid("m", cores, limits, quick=quick)
    assert {setting.phase for setting in found} - {Phase.MIXED} == {Phase.PREFILL, Phase.DECODE}
    assert len(set(found)) == len(found)
    for setting in found:
        assert setting.cores == cores
        lengths = [start + append for start, append in zip(setting.starts, setting.appends, strict=True)]
        assert max(lengths) <= limits.context
        assert sum(lengths) <= limits.tokens
        assert len(lengths) <= limits.batch
        assert min(setting.appends) >= 1
        if setting.phase is not Phase.DECODE:
            assert sum(setting.appends) <= limits.chunk
        decoding = len(setting.starts) if setting.phase is Phase.DECODE else setting.rows
        assert set(setting.appends[:decoding]) <= {1}
        assert min(setting.starts[:decoding], default=1) >= 1


def test_a_grid_has_what_a_curve_needs() -> None:
    found = [setting.work(2) for setting in grid("m", 1, ROOMY)]
    decodes = [work for work in found if work.phase is Phase.DECODE]
    prefills = [work for work in found if work.phase is Phase.PREFILL]
    assert {2, 10, 32} == {work.rows for work in found if work.phase is Phase.MIXED}
    assert {1, 2, 4, 8, 16, 32, 64, 96, 128, 256} <= {work.batch for work in decodes}
    assert {4, 8, 16, 32, 64, 128, 256, 512} <= {work.tokens for work in prefills}
    for batch in (1, 16, 64):
        assert len({work.context for work in decodes if work.batch == batch}) >= 4
    assert {work.batch for work in prefills} >= {1, 4, 16}
    assert any(work.context and work.tokens > 100 for work in prefills)
    assert {work.share for work in found} == {0.5}
    assert len(grid("m", 1, ROOMY, quick=True)) < len(found) / 3


def test_settings_are_the_work_that_they_say() -> None:
    assert prefill("m", 1, 3, 8).work(2) == Work.prefill("m", 0.5, [3, 3, 2])
    assert decode("m", 2, 2, 10).work(2) == Work.decode("m", 1.0, [5, 15])
    assert prefill("m", 1, 1, 4, 10).work(1).pairs == 4 * 10 + 10


def test_core_counts_of_small_and_large_machines() -> None:
    assert core_counts(1) == [1]
    assert core_counts(2) == [1, 2]
    assert core_counts(6) == [1, 2, 3, 4, 6]
    assert core_counts(64) == [1, 2, 3, 4, 8, 16, 32, 64]


def kinds(pair: tuple[Setting, Setting]) -> tuple[str, Phase, str, Phase]:
    return pair[0].model, pair[0].phase, pair[1].model, pair[1].phase


def test_pairs_are_those_that_adbs_makes() -> None:
    found = pairs(["a", "b"], 5, {"a": ROOMY, "b": ROOMY})
    assert {kinds(pair) for pair in found} == {
        *((one, Phase.PREFILL, other, Phase.DECODE) for one in "ab" for other in "ab"),
        ("a", Phase.DECODE, "b", Phase.DECODE),
    }
    assert all(one.cores + other.cores <= 5 for one, other in found)
    assert {one.cores for one, _ in found if one.phase is Phase.PREFILL} == {3}


def test_one_core_has_no_pairs_and_many_models_not_all() -> None:
    assert pairs(["a", "b"], 1, {"a": ROOMY, "b": ROOMY}) == []
    names = [f"m{i}" for i in range(12)]
    found = pairs(names, 2, dict.fromkeys(names, ROOMY))
    assert len(found) <= MAX_PAIRS
    assert len({kinds(pair) for pair in found}) == len(found)


@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize("models", range(1, 14))
def test_of_many_models_jobs_of_all_kinds_are_measured_beside_others(models: int, cores: int) -> None:
    each = [settings_beside_others(f"m{i}", cores, ROOMY) for i in range(models)]
    found = some_of([setting for some in each for setting in some], MAX_OVERSUBSCRIBED)
    assert len(found) == min(MAX_OVERSUBSCRIBED, sum(map(len, each)))

    def kinds(settings: list[Setting]) -> set[tuple[Phase, int, int]]:
        return {(one.phase, len(one.appends), sum(one.appends)) for one in settings}

    assert kinds(found) == kinds(each[0])
    assert {one.cores for one in found} == {one.cores for one in each[0]}


@given(limits)
def test_pairs_fit_together(limits: Limits) -> None:
    for one, other in pairs(["a", "b"], 2, {"a": limits, "b": limits}):
        assert sum(one.starts + one.appends + other.starts + other.appends) <= limits.tokens


class Recorder(WatchedExecutor):
    def __init__(self, models: dict[str, LoadedModel], arena: Arena, threads: int) -> None:
        super().__init__(models, arena, threads)
        self.jobs: list[Job] = []
        self.most_at_once = 0
        self._running = 0

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        self.jobs.append(job)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        future = super().launch(job)
        future.add_done_callback(self._over)
        return future

    def _over(self, _: object) -> None:
        self._running -= 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("profiled") / "llama", "llama")


@pytest.fixture
def executor(path: Path) -> Iterator[Recorder]:
    models = [ModelSpec(name=name, path=str(path)) for name in ("one", "two")]
    executor = Recorder.load(models, kv_bytes=2 << 20, block_bytes=2048, threads=2)
    yield executor
    executor.close()


SETTINGS = [
    prefill("one", 1, 1, 40),
    prefill("two", 2, 3, 20),
    prefill("one", 2, 1, 8, 100),
    decode("two", 1, 1, 50),
    decode("one", 2, 7, 30),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=JobRunner.told)
def test_a_job_is_what_its_setting_says(executor: Recorder, setting: Setting) -> None:
    runner = JobRunner(executor, temperature=0.0)

    async def run() -> list[float]:
        with runner.placed(setting) as ids:
            return [await runner.run(setting, ids) for _ in range(3)]

    assert min(asyncio.run(run())) > 0.0
    assert len(executor.jobs) == 3
    for job in executor.jobs:
        assert (job.model, job.phase, job.share) == (setting.model, setting.phase, setting.cores)
        assert tuple(job.plan.appends) == setting.appends
        assert tuple(job.plan.starts) == setting.starts  # none of them grows
        assert len(job.samples) == len(setting.starts)
        assert job.tokens.size == sum(setting.appends)
    runner.pool.check()
    assert runner.pool.free == runner.pool.total


def test_a_job_that_fails_leaves_nothing(executor: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = JobRunner(executor, temperature=0.0)

    def broken(*_: object) -> JobResult:
        raise RuntimeError("broken")

    monkeypatch.setattr(executor, "_run", broken)

    async def run() -> None:
        with runner.placed(SETTINGS[-1]) as ids:
            await runner.run(SETTINGS[-1], ids)

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run())
    runner.pool.check()
    assert runner.pool.free == runner.pool.total


def test_limits_are_those_of_the_pool(executor: Recorder) -> None:
    limits = JobRunner(executor, temperature=0.0).limits("one", 512, 4096)
    geometry = executor.geometries["one"]
    assert limits.page == geometry.tokens_per_block
    assert limits.tokens == 1024 // geometry.blocks_per_page * geometry.tokens_per_block
    assert (limits.context, limits.chunk, limits.batch) == (256, 256, 1024)


def test_two_jobs_run_at_once_and_are_told_of_each_other(executor: Recorder) -> None:
    runner = JobRunner(executor, temperature=0.0)
    pair = prefill("one", 1, 1, 64), decode("two", 1, 4, 32)
    first, second = asyncio.run(measure_pair(runner, pair, 3))
    assert first.job == second.beside == MeasuredJob.of(pair[0].work(1), 1)
    assert second.job == first.beside == MeasuredJob.of(pair[1].work(1), 1)
    assert executor.most_at_once == 2
    runner.pool.check()
    assert runner.pool.free == runner.pool.total


def test_steps_under_the_engine(executor: Recorder, path: Path) -> None:
    spec = spec_of({"one": path, "two": path}, max_waiting=1)  # which does not hold here
    stepped = asyncio.run(measure_step(executor, spec, "two", 4, 6, 1.0))
    assert stepped is not None
    assert (stepped.model, stepped.sequences) == ("two", 4)
    decodes = [job for job in executor.jobs if job.phase is Phase.DECODE]
    assert {job.model for job in executor.jobs} == {"two"}
    assert max(len(job.plan.sequences) for job in decodes) == 4
    assert 0.0 < stepped.gap < 1.0
    assert 0.0 < stepped.step < 1.0
    assert 4 * PROMPT < stepped.context < 4 * (PROMPT + 6)


@pytest.mark.parametrize("planned", [{}, {"prefill_share": 0.5, "decode_share": 0.5, "slo": Slo(1e-6, 1e-6)}])
def test_prompts_come_while_one_sequence_decodes(
    executor: Recorder, path: Path, planned: dict[str, Any]
) -> None:
    """Whatever a config plans, jobs come one after the other, and a prompt is let in at once."""
    spec = spec_of({"one": path, "two": path})
    spec = replace(spec, models=tuple(replace(model, **planned) for model in spec.models))
    executor.most_at_once = 0
    found = asyncio.run(measure_prefill_gap(executor, spec, "two", prompts=5, tokens=16, temperature=1.0))
    assert found is not None
    assert found.model == "two"
    assert 0.0 <= found.gap < 1.0
    prompts = [job for job in executor.jobs if job.phase is not Phase.DECODE]
    assert [int(job.plan.appends.max()) for job in prompts] == [PROMPT] + [16] * 5
    assert {job.share for job in executor.jobs} == {executor.compute}
    assert executor.most_at_once == 1
    assert max(len(job.plan.sequences) for job in executor.jobs if job.phase is Phase.DECODE) == 1


def test_steps_of_more_than_may_run_are_none(executor: Recorder, path: Path) -> None:
    spec = spec_of({"one": path, "two": path}, max_running=2)
    assert asyncio.run(measure_step(executor, spec, "one", 4, 6, 1.0)) is None
