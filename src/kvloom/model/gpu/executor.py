"""Runs jobs on one GPU: decode steps from recordings, prefills as they come, side by side on its
partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor

from kvloom.core.arrays import AnyArray
from kvloom.core.errors import Unavailable
from kvloom.core.geometry import Geometry
from kvloom.core.job import Job, JobResult, Phase
from kvloom.core.plan import PageCopy
from kvloom.core.request import ModelCard, TokenLogprob
from kvloom.kv.arena import Store
from kvloom.model.gpu.attender import DeviceAttender
from kvloom.model.gpu.device import Device
from kvloom.model.gpu.graphs import Buffers, DecodeSteps, buckets_up_to
from kvloom.model.gpu.model import DeviceModel
from kvloom.model.gpu.partitions import Lane
from kvloom.model.gpu.polling import PolledSteps
from kvloom.model.gpu.sampling import Draws
from kvloom.model.gpu.staging import Sent, Staging, widened
from kvloom.model.gpu.state import Places, PrefillState
from kvloom.model.sampler import prompt_logprobs


class _Slot:
    """A thread for one job at a time, with memory of its own to send from and fetch to."""

    def __init__(self, number: int, device: Device) -> None:
        self.thread = ThreadPoolExecutor(1, f"gpu-job-{number}")
        self.staging = Staging(device)


class GpuExecutor:
    """Satisfies core's `Executor`. A job has a thread and a lane; a share is a number of multiprocessors.

    A job's thread asks the device for all that the job needs, and then waits once, for its tokens. Jobs that
    share a lane ask one after the other; jobs on lanes of one partition's sides run at the same time.
    """

    def __init__(self, models: dict[str, DeviceModel], arena: Store, device: Device) -> None:
        self.arena = arena
        self.blocks = arena.blocks
        self.compute = device.compute
        self.stride = 1
        self._models = models
        self._device = device
        self._slots: list[_Slot] = []
        self._idle: list[_Slot] = []
        self._steps: dict[tuple[str, Lane], DecodeSteps] = {}
        self._buffers: dict[Lane, Buffers] = {}
        self._polled: PolledSteps | None = None
        self._reason = ""
        self._breaks = asyncio.Event()

    def prepare(
        self, *, most_running: int, chunk: int, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """Run what jobs will run, so that kernels are compiled, memory is taken and decode steps are
        recorded. chunk: prompt tokens of a job. Raises torch's OutOfMemoryError where the rest of the
        memory is too little."""
        self._device.enter()
        pages = max(one.geometry.pages(one.card.context_length) for one in self._models.values())
        for model in self._models.values():
            progress(f"warming up {model.card.name}")
            longest = min(chunk, model.card.context_length)
            for tokens in (*(1 << i for i in range(longest.bit_length())), longest):
                self._rehearse(model, tokens)
        for i, lane in enumerate(self._device.partitions.lanes):
            buffers = self._buffers[lane] = Buffers(most_running, pages, self._device.torch)
            for name, model in self._models.items():
                progress(f"recording decode steps of {name} ({i + 1}/{len(self._device.partitions.lanes)})")
                steps = self._steps[name, lane] = DecodeSteps(model, lane, buffers)
                for rows in buckets_up_to(most_running):
                    if not steps.record(rows):
                        break

    def lend(self, attender: DeviceAttender | None) -> None:
        """From the next job on forwards poll for its tasks; with None, none does. Waits for jobs that are
        asking the device just now."""
        with ExitStack() as stack:
            for lane in self._device.partitions.lanes:
                stack.enter_context(lane.lock)
            if self._polled is not None:
                self._polled.close()
            self._polled = PolledSteps(attender, self._models, self._buffers) if attender else None

    @property
    def cards(self) -> dict[str, ModelCard]:
        return {name: model.card for name, model in self._models.items()}

    @property
    def geometries(self) -> dict[str, Geometry]:
        return {name: model.geometry for name, model in self._models.items()}

    async def lost(self) -> str:
        """Wait until no job can run any more; why. After an error of its own a device refuses all."""
        await self._breaks.wait()
        return f"{self._device.torch} has failed: {self._reason}"

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        lane = self._device.partitions.take(job.share)
        if not self._idle:
            self._slots.append(_Slot(len(self._slots), self._device))
            self._idle.append(self._slots[-1])
        slot = self._idle.pop()
        future = asyncio.get_running_loop().run_in_executor(slot.thread, self._run, job, lane, slot.staging)

        def ended(job: asyncio.Future[JobResult]) -> None:
            self._idle.append(slot)
            self._device.partitions.give_back(lane)
            if not job.cancelled() and isinstance(job.exception(), torch.AcceleratorError):
                self._reason = " ".join(str(job.exception()).split())[:200]
                self._breaks.set()

        future.add_done_callback(ended)
        return future

    def taken(self, job: Job) -> int:
        return job.steps

    def cut(self, job: Job) -> None:
        """Each has one step."""

    def close(self) -> None:
        """Wait for running jobs and end the threads."""
        for slot in self._slots:
            slot.thread.shutdown()

    # on a job's thread

    def _run(self, job: Job, lane: Lane, staging: Staging) -> JobResult:
        started = time.perf_counter()
        self._device.enter()
        try:
            tokens, reports, prompts = self._ask(job, lane, staging)
        except torch.OutOfMemoryError as error:
            lane.mark().wait()  # what was asked for may still write to blocks that are about to be others'
            self._device.trim()
            free, total = self._device.free()
            raise Unavailable(
                f"{job.model}: a {job.phase} job of {job.tokens.size} tokens finds too little memory on "
                f"{self._device.torch}: {free:,} of {total:,} bytes are free; a smaller kv_memory or "
                "chunk_tokens is right"
            ) from error
        except BaseException:
            lane.mark().wait()
            raise
        return JobResult(tokens, list(reports), prompts, time.perf_counter() - started)

    def _ask(
        self, job: Job, lane: Lane, staging: Staging
    ) -> tuple[list[int], Sequence[TokenLogprob | None], list[TokenLogprob]]:
        model, draws = self._models[job.model], Draws.of(job.samples)
        with torch.inference_mode(), lane.lock, lane.entered(), self._polling():
            run = self._decode if job.phase is Phase.DECODE else self._prefill
            logits, sent = run(model, job, lane, staging, draws)
            count = len(job.samples)
            ids, reports = draws.take(logits[:count], sent.arrays)
            prompts = prompt_logprobs(logits[count:], job.prompts)
            tokens, mark = staging.fetch(ids), lane.mark()
        mark.wait()
        return tokens.tolist(), reports, prompts

    def _polling(self) -> AbstractContextManager[None]:
        """With a lane's lock, which keeps `_polled` what it is."""
        return self._polled.attender.polled() if self._polled else nullcontext()

    def _decode(
        self, model: DeviceModel, job: Job, lane: Lane, staging: Staging, draws: Draws
    ) -> tuple[Tensor, Sent]:
        """→ logits [samples and prompts, V], and what was sent."""
        polled = self._polled
        steps = polled.steps(job, lane) if polled else self._steps[job.model, lane]
        arrays = steps.arrays(job) | _kept(job) | draws.arrays | model.copies(job.plan.copies)
        sent = model.page_map.refresh(job.plan, lane, lambda rows: staging.send({**arrays, **rows}))
        model.copy_pages(sent)
        logits = steps.run(job, sent)
        for send in job.plan.sends:
            send.shipment.put(send.whole(job.plan.page_map))
        return logits.index_select(0, sent.arrays["kept"]), sent

    def _prefill(
        self, model: DeviceModel, job: Job, lane: Lane, staging: Staging, draws: Draws
    ) -> tuple[Tensor, Sent]:
        plan = job.plan
        arrays: dict[str, AnyArray] = {
            "tokens": job.tokens,
            "positions": plan.positions,
            "slot_page": plan.slot_page,
            "slot_offset": plan.slot_offset,
            "tables": widened(plan.tables),
            "starts": plan.starts.astype(np.int32),
            "begins": np.concatenate(([0], np.cumsum(plan.appends))).astype(np.int32),
            **_kept(job),
            **draws.arrays,
            **model.copies(plan.copies),
        }
        sent = model.page_map.refresh(plan, lane, lambda rows: staging.send({**arrays, **rows}))
        model.copy_pages(sent)

        def written(layer: int) -> None:
            for send in plan.sends:
                send.shipment.put(send.parcel(plan.page_map, layer))

        poll = self._polled.attender.poll if self._polled else _nothing
        return _prefill(model, sent.arrays, written, poll), sent

    def _rehearse(self, model: DeviceModel, tokens: int) -> None:
        """A prefill of so many tokens that are written nowhere, and a copy of no tokens."""
        lane, none = self._device.partitions.whole, np.zeros(tokens, dtype=np.int32)
        arrays: dict[str, AnyArray] = {
            "tokens": np.zeros(tokens, dtype=np.int64),
            "positions": np.arange(tokens),
            "slot_page": none - 1,
            "slot_offset": none,
            "tables": widened(np.zeros((1, model.geometry.pages(tokens)), dtype=np.int32)),
            "starts": none[:1],
            "begins": np.asarray([0, tokens], dtype=np.int32),
            "kept": np.asarray([tokens - 1]),
            **model.copies((PageCopy(0, 0, 0),)),
        }
        with torch.inference_mode(), lane.entered():
            sent = Staging(self._device).send(arrays)
            model.copy_pages(sent)
            _prefill(model, sent.arrays, lambda layer: None, _nothing)
        lane.mark().wait()


def _nothing() -> None:
    """Between two operators."""


def _prefill(
    model: DeviceModel, arrays: dict[str, Tensor], written: Callable[[int], None], poll: Callable[[], None]
) -> Tensor:
    places = Places(
        model.arena, model.page_map.blocks, arrays["tables"], arrays["slot_page"], arrays["slot_offset"]
    )
    state = PrefillState(model.operations, places, arrays["starts"], arrays["begins"], written, poll)
    return model.logits(arrays["tokens"], arrays["positions"], state, arrays["kept"])


def _kept(job: Job) -> dict[str, AnyArray]:
    """The rows whose logits are wanted: those of the draws, then those of the prompt's tokens."""
    rows = [row.row for row in job.samples] + [row.row for row in job.prompts]
    return {"kept": np.asarray(rows, dtype=np.int64)}
