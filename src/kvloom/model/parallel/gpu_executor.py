"""Runs jobs on several GPUs, of which this process has the first rank's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvloom.core.errors import Unavailable
from kvloom.core.job import Job, JobResult
from kvloom.core.spec import EngineSpec
from kvloom.kv.arena import Store
from kvloom.model.gpu.device import Device, uncut
from kvloom.model.gpu.executor import GpuExecutor
from kvloom.model.gpu.loading import load_pool, open_gpu, rehearse
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.operations import Operations
from kvloom.model.parallel.group import SECONDS, Group
from kvloom.model.parallel.ranks import Ranks, Start, start_process


class ParallelGpuExecutor(GpuExecutor):
    """Each rank has its heads of every page, in an arena of its own with as many blocks, and runs each job
    too; this one draws the tokens. All jobs take turns on one lane of each device, told in the order in which
    they are asked for, so that exchanges meet in one order everywhere. A job has one step: the tokens of a
    step are drawn here.

    A job that fails on its way to the logits ends the ranks, and so do `seconds` without a job's end while
    some are under way: an exchange that waits on a device for a rank which does not come ends with the
    process alone.
    """

    def __init__(
        self,
        models: dict[str, DeviceModel],
        arena: Store,
        device: Device,
        ranks: Ranks,
        seconds: float,
    ) -> None:
        super().__init__(models, arena, device)
        self.stride, self.ahead = 1, 0
        self._ranks = ranks
        self._seconds = seconds
        self._broken = False
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def over(
        spec: EngineSpec,
        device: Device,
        operations: Operations,
        folder: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
        start: Start = start_process,
        seconds: float = SECONDS,
    ) -> ParallelGpuExecutor:
        """Start the other ranks, and load with them. folder, start: see `Ranks`. Raises ConfigError, and
        Unavailable where a rank ends meanwhile."""
        progress(f"starting {spec.tensor_parallel} ranks")
        ranks = Ranks(spec, device.torch, folder, start)

        def load() -> ParallelGpuExecutor:
            models, arena = load_pool(spec, device, operations, progress, ranks)
            executor = ParallelGpuExecutor(models, arena, device, ranks, seconds)
            rehearse(executor, spec, device, progress, all_alike(ranks.group))
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
        """From now on, for the end of the next of the jobs that are under way."""
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
        """In a turn of the lane: no job is told between another one's being told and asked for, and none
        after one that failed on the way."""
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
    """Raises ConfigError with what a device lacks, Unavailable where a rank ends meanwhile."""
    progress(f"opening {spec.device}")
    device, operations = open_gpu(spec.device, cut=uncut)
    return ParallelGpuExecutor.over(spec, device, operations, folder, progress)


def all_alike(group: Group) -> Callable[[bool], bool]:
    """Whether a step has been recorded, which all ranks must find alike, or their exchanges would differ."""

    def agree(recorded: bool) -> bool:
        if group.agree(recorded) != recorded:
            raise Unavailable("decode steps could be recorded at some ranks and not at others")
        return recorded

    return agree


def _unless_lost(ranks: Ranks, load: Callable[[], ParallelGpuExecutor]) -> ParallelGpuExecutor:
    """What `load` gives. Raises Unavailable at once where a rank ends meanwhile: on a GPU an exchange may
    then hang, on a thread that is left to the end of the process."""
    loaded: Future[ParallelGpuExecutor] = Future()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001  (it is raised by who waits)
            loaded.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    either: list[Future[Any]] = [loaded, ranks.lost]
    wait(either, return_when=FIRST_COMPLETED)
    if not loaded.done():
        raise Unavailable(ranks.lost.result())
    return loaded.result()
