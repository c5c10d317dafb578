"""Jobs of one unit on several GPUs: the executor of the first rank, the worker of each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from kvloom.exec.cuda.device import GpuDevice, uncut
from kvloom.exec.cuda.executor import GpuExecutor, StepProgress
from kvloom.exec.cuda.loader import load_pool, open_gpu, rehearse
from kvloom.exec.cuda.model import DeviceModel
from kvloom.exec.cuda.operations import Operations
from kvloom.exec.cuda.staging import Staging
from kvloom.exec.parallel.group import SECONDS
from kvloom.exec.parallel.ranks import Member, Ranks, Start, check, start_process
from kvloom.exec.parallel.wire import StartRank, Step, ToldMap
from kvloom.kv.arena import ArenaMemory
from kvloom.types.errors import Unavailable
from kvloom.types.job import Job, JobResult, SampleRow
from kvloom.types.request import SamplingParams
from kvloom.types.spec import EngineSpec


class ParallelGpuExecutor(GpuExecutor):
    """Has its heads of every page, as each rank has, in an arena with as many blocks as those of the others,
    and runs each job as they do; this rank alone draws the tokens. All jobs take turns on one lane of each
    device, told in the order in which they are asked for, so that exchanges meet in one order everywhere. A
    job has one step: the tokens of a step are drawn here.

    A job that fails on its way to the logits ends the ranks, and so do `seconds` without a job's end while
    some are under way: an exchange that waits on a device for a rank which does not come ends with the
    process alone.
    """

    def __init__(
        self,
        models: dict[str, DeviceModel],
        arena: ArenaMemory,
        device: GpuDevice,
        ranks: Ranks,
        seconds: float,
    ) -> None:
        super().__init__(models, arena, device)
        self.max_steps, self.lookahead = 1, 0
        self._ranks = ranks
        self._seconds = seconds
        self._broken = False
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def over(
        spec: EngineSpec,
        device: GpuDevice,
        operations: Operations,
        folder: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        start: Start = start_process,
        seconds: float = SECONDS,
    ) -> ParallelGpuExecutor:
        """Starts the other ranks, and loads with them. folder, start: see `Ranks`. Raises ConfigError, and
        Unavailable if a rank ends meanwhile."""
        progress(f"starting {spec.tensor_parallel} ranks")
        ranks = Ranks(spec, device.torch, folder, start)

        def load() -> ParallelGpuExecutor:
            models, arena = load_pool(spec, device, operations, progress, ranks)
            executor = ParallelGpuExecutor(models, arena, device, ranks, seconds)
            rehearse(executor, spec, device, progress, ranks)
            ranks.meet()
            return executor

        with ranks.loading():
            executor = _unless_lost(ranks, load)
        ranks.serve(executor.geometries, executor.blocks)
        return executor

    async def lost(self) -> str:
        return await self._ranks.ended()

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        future = super().launch(job)
        future.add_done_callback(self._ended)
        self._under_way += 1
        if self._under_way == 1:
            self._watch()
        return future

    def _ended(self, _: asyncio.Future[JobResult]) -> None:
        self._under_way -= 1
        self._watch()

    def _watch(self) -> None:
        """Waits anew, from now on, for the end of the next of the jobs that are under way."""
        if self._timer is not None:
            self._timer.cancel()
        loop, seconds = asyncio.get_running_loop(), self._seconds
        self._timer = loop.call_later(seconds, self._ranks.late, seconds) if self._under_way else None

    def close(self) -> None:
        self._ranks.close()
        super().close()

    def _run(self, *given: Any) -> JobResult:
        try:
            return super()._run(*given)
        except Exception as error:
            if self._broken or isinstance(error, torch.AcceleratorError):
                raise self._ranks.failed(error) from error
            raise  # all ranks have done their parts

    @contextmanager
    def _told(self, job: Job) -> Iterator[None]:
        """Tells the other ranks of a job in a turn of the lane: no job is told between another one's being
        told and asked for, and none after one that failed on the way."""
        if self._broken:
            raise Unavailable("a job before it has failed")
        try:
            self._ranks.step(0, job, job.kept)
            yield
        except BaseException:
            self._broken = True
            raise


def load_parallel_gpu_executor(
    spec: EngineSpec, folder: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> ParallelGpuExecutor:
    """Loads a unit of several GPUs. Raises ConfigError with what a device lacks, Unavailable if a rank ends
    meanwhile."""
    progress(f"opening {spec.device}")
    device, operations = open_gpu(spec.device, cut=uncut)
    return ParallelGpuExecutor.over(spec, device, operations, folder, progress)


def _unless_lost(ranks: Ranks, load: Callable[[], ParallelGpuExecutor]) -> ParallelGpuExecutor:
    """Returns what `load` gives. Raises Unavailable at once if a rank ends meanwhile: on a GPU an exchange
    may then hang, on a thread that is left to the end of the process."""
    loaded: Future[ParallelGpuExecutor] = Future()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
            loaded.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    either: list[Future[Any]] = [loaded, ranks.lost]
    wait(either, return_when=FIRST_COMPLETED)
    if not loaded.done():
        raise Unavailable(ranks.lost.result())
    return loaded.result()


_LARGEST = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class GpuWorker(GpuExecutor):
    """Runs the steps that the first rank sends, one after the other. It takes the largest of the logits,
    which all ranks have, and nobody asks for that."""

    def __init__(self, models: dict[str, DeviceModel], arena: ArenaMemory, device: GpuDevice) -> None:
        super().__init__(models, arena, device)
        self._lane, self._staging = device.partitions.whole, Staging(device)
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._maps = {name: ToldMap(model.geometry, arena.blocks) for name, model in models.items()}

    @classmethod
    def on_gpu(cls, begin: StartRank, member: Member) -> Self:
        """Opens the rank's GPU and loads. Raises ConfigError with what the device lacks, Unavailable if
        another rank is gone."""
        device, operations = open_gpu(begin.spec.device, uncut, begin.rank)
        return cls.over(begin, member, device, operations)

    @classmethod
    def over(cls, begin: StartRank, member: Member, device: GpuDevice, operations: Operations) -> Self:
        member.join(begin, device.torch)
        worker = cls(*load_pool(begin.spec, device, operations, team=member), device)
        rehearse(worker, begin.spec, device, team=member)
        member.meet()
        return worker

    def start(self, step: Step) -> None:
        """Starts a step. What it says of the page map holds for those after it."""
        plan = self._maps[step.model].plan(step)
        samples = tuple(SampleRow(row, 0, 0, _LARGEST) for row in step.array("kept").tolist())
        job = Job(step.model, step.phase, step.share, plan, step.array("tokens"), samples)
        ran = self._thread.submit(self._run, job, self._lane, self._staging, StepProgress(1), _nobody)
        ran.add_done_callback(check)


def _nobody(tokens: list[int]) -> None:
    """Ignores a step's tokens: each job has one step."""
