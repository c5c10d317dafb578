"""What a rank but the first does with its GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Self

from kvloom.core.job import Job, SampleRow
from kvloom.core.sampling import SamplingParams
from kvloom.kv.arena import Store
from kvloom.model.gpu.device import Device, uncut
from kvloom.model.gpu.executor import GpuExecutor
from kvloom.model.gpu.loading import load_pool, open_gpu, rehearse
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.operations import Operations
from kvloom.model.gpu.progress import Progress
from kvloom.model.gpu.staging import Staging
from kvloom.model.parallel.gpu_executor import all_alike
from kvloom.model.parallel.member import Member, check
from kvloom.model.parallel.steps import ToldMap, ids_of
from kvloom.model.parallel.wire import Begin, Step

_LARGEST = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class GpuWorker(GpuExecutor):
    """Runs the steps that the first rank sends, one after the other. Of the logits, which all ranks have, it
    takes the largest, and nobody asks for that."""

    def __init__(self, models: dict[str, DeviceModel], arena: Store, device: Device) -> None:
        super().__init__(models, arena, device)
        self._lane, self._staging = device.partitions.whole, Staging(device)
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._maps = {name: ToldMap(model.geometry, arena.blocks) for name, model in models.items()}

    @classmethod
    def on_gpu(cls, begin: Begin, member: Member) -> Self:
        """Raises ConfigError with what the device lacks, Unavailable where another rank is gone."""
        device, operations = open_gpu(begin.spec.device, uncut, begin.rank)
        return cls.over(begin, member, device, operations)

    @classmethod
    def over(cls, begin: Begin, member: Member, device: Device, operations: Operations) -> Self:
        member.join(begin, device.torch)
        worker = cls(*load_pool(begin.spec, device, operations, team=member), device)
        rehearse(worker, begin.spec, device, agree=all_alike(member.group))
        return worker

    def start(self, step: Step) -> None:
        """What a step says of the page map holds for those after it."""
        tokens, kept = ids_of(step)
        plan = self._maps[step.model].plan(step)
        samples = tuple(SampleRow(row, 0, 0, _LARGEST) for row in kept.tolist())
        job = Job(step.model, step.phase, step.share, plan, tokens, samples)
        ran = self._thread.submit(self._run, job, self._lane, self._staging, Progress(1), _nobody)
        ran.add_done_callback(check)


def _nobody(tokens: list[int]) -> None:
    """Is told of a step's tokens: each job has one step."""
