"""Real jobs of a real executor: they are what they are said to be, and leave the pool as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena
from kvloom.lab.profile.beside import measure_pair
from kvloom.lab.profile.jobs import Setting, Stage, decode, prefill
from kvloom.lab.profile.stepping import WatchedExecutor, measure_steps
from kvloom.plan.cost.profile import JobMeasured
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.spec import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.engines import spec_of


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


@pytest.mark.parametrize("setting", SETTINGS, ids=Stage.told)
def test_a_job_is_what_its_setting_says(executor: Recorder, setting: Setting) -> None:
    stage = Stage(executor, temperature=0.0)

    async def run() -> list[float]:
        with stage.placed(setting) as ids:
            return [await stage.run(setting, ids) for _ in range(3)]

    assert min(asyncio.run(run())) > 0.0
    assert len(executor.jobs) == 3
    for job in executor.jobs:
        assert (job.model, job.phase, job.share) == (setting.model, setting.phase, setting.cores)
        assert tuple(job.plan.appends) == setting.appends
        assert tuple(job.plan.starts) == setting.starts  # none of them grows
        assert len(job.samples) == len(setting.starts)
        assert job.tokens.size == sum(setting.appends)
    stage.pool.check()
    assert stage.pool.free == stage.pool.total


def test_a_job_that_fails_leaves_nothing(executor: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(executor, temperature=0.0)

    def broken(*_: object) -> JobResult:
        raise RuntimeError("broken")

    monkeypatch.setattr(executor, "_run", broken)

    async def run() -> None:
        with stage.placed(SETTINGS[-1]) as ids:
            await stage.run(SETTINGS[-1], ids)

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run())
    stage.pool.check()
    assert stage.pool.free == stage.pool.total


def test_limits_are_those_of_the_pool(executor: Recorder) -> None:
    limits = Stage(executor, temperature=0.0).limits("one", 512, 4096)
    geometry = executor.geometries["one"]
    assert limits.page == geometry.tokens_per_block
    assert limits.tokens == 1024 // geometry.blocks_per_page * geometry.tokens_per_block
    assert (limits.context, limits.chunk, limits.batch) == (256, 256, 1024)


def test_two_jobs_run_at_once_and_are_told_of_each_other(executor: Recorder) -> None:
    stage = Stage(executor, temperature=0.0)
    pair = prefill("one", 1, 1, 64), decode("two", 1, 4, 32)
    first, second = asyncio.run(measure_pair(stage, pair, 3))
    assert first.doing == second.beside == JobMeasured.of(pair[0].work(1), 1)
    assert second.doing == first.beside == JobMeasured.of(pair[1].work(1), 1)
    assert executor.most_at_once == 2
    stage.pool.check()
    assert stage.pool.free == stage.pool.total


def test_steps_under_the_engine(executor: Recorder, path: Path) -> None:
    spec = spec_of({"one": path, "two": path})
    stepped = asyncio.run(measure_steps(executor, spec, "two", 4, 6))
    assert stepped is not None
    assert (stepped.model, stepped.sequences) == ("two", 4)
    decodes = [job for job in executor.jobs if job.phase is Phase.DECODE]
    assert {job.model for job in executor.jobs} == {"two"}
    assert max(len(job.plan.sequences) for job in decodes) == 4
    assert 0.0 < stepped.between < 1.0
    assert 0.0 < stepped.step < 1.0


def test_steps_of_more_than_may_run_are_none(executor: Recorder, path: Path) -> None:
    spec = spec_of({"one": path, "two": path}, max_running=2)
    assert asyncio.run(measure_steps(executor, spec, "one", 4, 6)) is None
