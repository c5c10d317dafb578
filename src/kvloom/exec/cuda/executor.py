"""The executor of one GPU: it runs decode steps and short prefills from recordings, and long ones as they
come, side by side on the GPU's partitions."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kvloom.exec.cuda.device import GpuDevice, PartitionLane, StreamEvent
from kvloom.exec.cuda.graphs import Buffers, DecodeSteps, PrefillSteps, buckets_up_to, prefill_sizes
from kvloom.exec.cuda.memory_need import MemoryNeed, largest_jobs
from kvloom.exec.cuda.model import DeviceModel
from kvloom.exec.cuda.offloaded import CudaLoans
from kvloom.exec.cuda.prefill import Draws, prefill_inputs, prove_flash, rehearse, run_prefill
from kvloom.exec.cuda.staging import SentInputs, Slots, Staging
from kvloom.exec.cuda.weights import GpuWeights
from kvloom.exec.sampler import prompt_logprobs
from kvloom.kv.arena import ArenaMemory
from kvloom.offload.cuda import Serve
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import AnyArray, Geometry
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.request import ModelCard, TokenLogprob

_Record = Callable[[Callable[[], AbstractContextManager[None]]], bool]
STRIDE: Final = 32  # steps of a decode job: each takes a row's next page at once, of about as many tokens


class StepProgress:
    """The progress of a job of several steps."""

    def __init__(self, steps: int) -> None:
        self.begun = 1  # steps that the device has been asked for
        self._most = steps
        self._lock = threading.Lock()

    def goes_on(self) -> bool:
        """Returns whether there is to be another step, and counts it as begun."""
        with self._lock:
            more = self.begun < self._most
            self.begun += more
            return more

    def cut(self) -> None:
        """Lets no other step begin."""
        with self._lock:
            self._most = self.begun


class GpuExecutor:
    """Satisfies the engine's `Executor`. A job has a thread and a lane; a share is a number of
    multiprocessors.

    A job's thread asks the device for all that the job needs, and then waits for its tokens. In a job of
    several steps a step's tokens go into the next on the device, which has always been asked for one step
    more than the one whose tokens the thread waits for. Jobs that share a lane ask step after step by turns;
    jobs on lanes of one partition's sides run at the same time.
    """

    def __init__(
        self,
        models: dict[str, DeviceModel],
        arena: ArenaMemory,
        device: GpuDevice,
        weights: GpuWeights | None = None,
    ) -> None:
        """weights: None if all stay."""
        self.arena = arena
        self.blocks = arena.blocks
        self.compute = device.compute
        self.max_steps, self.lookahead = STRIDE, 1
        self.weights = weights
        self.adapters = None
        self._models = models
        self._device = device
        self._slots = Slots(device)
        self._progress: dict[int, StepProgress] = {}  # by id, for as long as somebody holds the job
        self._steps: dict[tuple[str, PartitionLane], DecodeSteps] = {}
        self._prefills: dict[tuple[str, PartitionLane], PrefillSteps] = {}
        self._buffers: dict[PartitionLane, Buffers] = {}
        self._plain = {name for name, one in models.items() if not one.records}
        self.loans = CudaLoans(models, self._buffers, device.partitions.lanes, self._plain)
        self._reason = ""
        self._breaks = asyncio.Event()

    def prepare(
        self,
        *,
        most_running: int,
        chunk: int,
        progress: Callable[[str], None] = lambda _: None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Runs each forward that jobs will run, so that kernels are compiled, memory is taken and decode
        steps are recorded. chunk: prompt tokens of a job. agree: returns whether all ranks have recorded a
        step, if there are several; it raises if some have and others have not. Raises torch's
        OutOfMemoryError if the rest of the memory is too little."""
        self._begin(most_running, chunk)
        for name in self._models:
            with nullcontext() if self.weights is None else self.weights.awake(name):
                progress(f"warming up {name}")
                model = self._models[name] = prove_flash(self._models[name], self._device)
                longest = min(chunk, model.card.context_length)
                for tokens in (*(1 << i for i in range(longest.bit_length())), longest):
                    rehearse(model, tokens, self._device)
                for i, lane in enumerate(self.lanes):
                    progress(f"recording steps of {name} ({i + 1}/{len(self.lanes)})")
                    records = self._records(name, lane, most_running, longest if self.weights is None else 0)
                    self._record(name, [*records[0], *records[1]], agree)

    def measure(
        self,
        *,
        most_running: int,
        chunk: int,
        taken: Callable[[], int],
        agree: Callable[[bool], bool] = bool,
        awake: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> MemoryNeed:
        """Returns the memory that jobs need beside weights and pool, in a pool of any size. It is found by
        running the largest jobs on each lane. The executor is of no use for jobs afterwards. taken: returns
        the device's bytes that count as taken now. awake: a context in which a model's weights are in memory;
        None if all always are. The other parameters and errors are those of `prepare`.

        The largest steps of a lane are recorded first, and others fit into their memory, as far as torch
        allocates it. The memory that the driver takes for a recording is measured on the last one, and
        assumed for each."""

        def settled() -> int:
            """Returns the bytes that are taken once this process has given back all that it does not use."""
            self._device.settle()
            self._device.trim()
            return taken()

        before = settled()
        self._begin(most_running, chunk)
        kept, running = settled() - before, dict.fromkeys(self.lanes, 0)
        threads = [self._slots.take() for _ in range(2 * len(self._models))]  # each has libraries' workspaces
        for name in self._models:
            with nullcontext() if awake is None else awake(name):
                before = settled()
                model = self._models[name] = prove_flash(self._models[name], self._device)
                longest = min(chunk, model.card.context_length)
                jobs = largest_jobs(name, model, most_running, longest)
                widths = [len(model.widths(size)) for size in _sizes(model, most_running)]
                for lane in self.lanes:
                    prefills, steps = self._records(name, lane, most_running, longest if awake is None else 0)
                    self._record(name, [*prefills[:1], *steps[:2]], agree)
                    largest = settled()
                    self._record(name, steps[-1:], agree)
                    others = len(prefills[1:]) + sum(widths[2:-1])
                    kept += others * -(-max(0, settled() - largest) // widths[-1])
                    for job, thread in ((job, thread) for job in jobs for thread in threads):
                        thread.thread.submit(self._try, job, lane, thread.staging).result()
                    lane.mark().wait()
                    most = taken()
                    kept += (after := settled()) - before
                    before, running[lane] = after, max(running[lane], most - after)
            threads = threads[:1]
        flash = {name for name, model in self._models.items() if model.operations.flash is not None}
        at_once = self._device.partitions.at_once(running)
        return MemoryNeed(kept, at_once, frozenset(self._plain), frozenset(flash))

    def _begin(self, most_running: int, chunk: int) -> None:
        """Takes the memory of what recordings read and write."""
        self._device.enter()
        self._device.settle()  # weights and pool, before other streams read them
        pages = max(one.geometry.pages(one.card.context_length) for one in self._models.values())
        for lane in self.lanes:
            with lane.entered():
                self._buffers[lane] = Buffers(most_running, pages, chunk, self._device.torch)

    def _records(
        self, name: str, lane: PartitionLane, most: int, chunk: int
    ) -> tuple[list[_Record], list[_Record]]:
        """Returns what records a model's prefills of up to `chunk` tokens on a lane, which take the most
        memory, the largest first, and its decode steps for batches of `_sizes`. chunk: 0 if prefills may have
        to wait for weights."""
        model = self._models[name]
        given = model, lane, self._buffers[lane]
        prefills = self._prefills[name, lane] = PrefillSteps(*given)
        steps = self._steps[name, lane] = DecodeSteps(*given)
        sizes = prefill_sizes(chunk, model.card.parameters, model.geometry.layers) if chunk else ()
        return (
            [partial(prefills.record, size) for size in sizes],
            [partial(steps.record, size) for size in _sizes(model, most)],
        )

    def _record(self, name: str, records: Iterable[_Record], agree: Callable[[bool], bool]) -> None:
        for record in records:
            if name in self._plain or not agree(record(self._device.unasked)):
                self._plain.add(name)
                break

    @property
    def device(self) -> GpuDevice:
        return self._device

    @property
    def lanes(self) -> Sequence[PartitionLane]:
        """The lanes that jobs run on."""
        return self._device.partitions.lanes

    @property
    def serve(self) -> Serve:
        """The operation by which a lane does tasks of another unit; all models have the same."""
        return next(iter(self._models.values())).operations.serve

    def beside(self) -> PartitionLane:
        """Returns a new lane beside those of jobs."""
        return self._device.beside()

    def enter(self) -> None:
        """Lets the calling thread use the device."""
        self._device.enter()

    def heads(self, model: str) -> int:
        """Returns the number of a model's query heads in all its layers; 0 if layers differ."""
        return self._models[model].heads

    @property
    def cards(self) -> dict[str, ModelCard]:
        return {name: model.card for name, model in self._models.items()}

    @property
    def geometries(self) -> dict[str, Geometry]:
        return {name: model.geometry for name, model in self._models.items()}

    async def lost(self) -> str:
        """Waits until no job can run any more, and returns why. After an error of its own a device refuses
        all."""
        await self._breaks.wait()
        return f"{self._device.torch} has failed: {self._reason}"

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        lane = self._device.partitions.take(job.share)
        slot = self._slots.take()
        progress = self._progress[id(job)] = StepProgress(job.steps)
        weakref.finalize(job, self._progress.pop, id(job), None)
        loop = asyncio.get_running_loop()

        def tell(tokens: list[int]) -> None:
            if job.on_step is not None:
                loop.call_soon_threadsafe(job.on_step, job, tokens)

        future = loop.run_in_executor(slot.thread, self._run, job, lane, slot.staging, progress, tell)

        def ended(job: asyncio.Future[JobResult]) -> None:
            self._slots.give_back(slot)
            self._device.partitions.give_back(lane)
            if not job.cancelled() and isinstance(job.exception(), torch.AcceleratorError):
                self._reason = " ".join(str(job.exception()).split())[:200]
                self._breaks.set()

        future.add_done_callback(ended)
        return future

    def steps_begun(self, job: Job) -> int:
        return self._progress[id(job)].begun

    def cut(self, job: Job) -> None:
        self._progress[id(job)].cut()

    def close(self) -> None:
        """Waits for running jobs and ends the threads."""
        self._slots.close()
        if self.weights is not None:
            self.weights.close()

    # on a job's thread

    def _try(self, job: Job, lane: PartitionLane, staging: Staging) -> None:
        """Does what `_run` does, with no caller to be told of its steps. Raises torch's OutOfMemoryError."""
        self._device.enter()
        self._ask(job, lane, staging, StepProgress(job.steps), lambda tokens: None)

    def _run(
        self,
        job: Job,
        lane: PartitionLane,
        staging: Staging,
        progress: StepProgress,
        tell: Callable[[list[int]], None],
    ) -> JobResult:
        started = time.perf_counter()
        self._device.enter()
        offloaded = self.loans.offloaded(job)
        try:
            if offloaded is not None:
                offloaded.move(self.arena.bytes, job)
            tokens, reports, prompts = self._ask(job, lane, staging, progress, tell)
        except torch.OutOfMemoryError as error:
            _settle(lane)
            self._device.trim()
            free, total = self._device.free()
            raise Unavailable(
                f"{job.model}: a {job.phase} job of {job.tokens.size} tokens finds too little memory on "
                f"{self._device.torch}: {free:,} of {total:,} bytes are free; a smaller kv_memory or "
                "chunk_tokens is right"
            ) from error
        except BaseException:
            _settle(lane)
            raise
        lost = offloaded.lost() if offloaded is not None else None
        return JobResult(tokens, list(reports), prompts, time.perf_counter() - started, lost)

    def _ask(
        self,
        job: Job,
        lane: PartitionLane,
        staging: Staging,
        progress: StepProgress,
        tell: Callable[[list[int]], None],
    ) -> tuple[list[int], Sequence[TokenLogprob | None], list[TokenLogprob]]:
        model, draws = self._models[job.model], Draws.of(job.samples, job.steps)
        with torch.inference_mode():
            with self._turn(job, lane):
                steps = self._steps_of(job, lane) if job.phase is Phase.DECODE else None
                with self._told(job):
                    if steps is None:
                        logits, sent = self._prefill(model, job, lane, staging, draws)
                    else:
                        logits, sent = self._decode(model, job, lane, staging, draws, steps)
                count = len(job.samples)
                ids, reports = draws.take(logits[:count], sent.arrays)
                prompts = prompt_logprobs(logits[count:], job.prompts)
                del logits  # jobs that wait for their next turn hold none
                asked = staging.fetch(ids), lane.mark()
            drawn: list[int] = []
            while steps is not None and job.steps > 1 and draws.on_device:
                with self._turn(job, lane):
                    if steps is not self._steps_of(job, lane) or not progress.goes_on():
                        break
                    model.advance(sent, ids)
                    ids, _ = draws.take(steps.run(sent), sent.arrays, progress.begun - 1)
                    later = staging.fetch(ids), lane.mark()
                tell(landed := _landed(*asked))
                drawn, asked = drawn + landed, later
            drawn += _landed(*asked)
        return drawn, reports or [None] * len(drawn), prompts

    @contextmanager
    def _turn(self, job: Job, lane: PartitionLane) -> Iterator[None]:
        """Sends all work that this thread asks for to the lane; no other thread's work comes between."""
        with lane.lock, lane.entered(), self.loans.attend(job, lane):
            yield

    def _told(self, job: Job) -> AbstractContextManager[None]:
        """Tells the other ranks of the job, if there are any."""
        return nullcontext()

    def _steps_of(self, job: Job, lane: PartitionLane) -> DecodeSteps:
        """Returns the steps of a job in a turn of the lane, in which loans stay what they are."""
        return self.loans.steps(job, lane) or self._steps[job.model, lane]

    def _send(
        self, model: DeviceModel, job: Job, lane: PartitionLane, staging: Staging, arrays: dict[str, AnyArray]
    ) -> SentInputs:
        """Sends a job's inputs, and does its copies on write."""
        arrays |= model.copies(job.plan.copies)
        sent = model.page_map.refresh(job.plan, lane, lambda rows: staging.send({**arrays, **rows}))
        model.copy_pages(sent)
        return sent

    def _decode(
        self,
        model: DeviceModel,
        job: Job,
        lane: PartitionLane,
        staging: Staging,
        draws: Draws,
        steps: DecodeSteps,
    ) -> tuple[Tensor, SentInputs]:
        """Asks for the first step. Returns logits [samples and prompts, V], and what was sent."""
        arrays = steps.arrays(job) | {"kept": job.kept} | draws.arrays
        sent = self._send(model, job, lane, staging, arrays)
        self._follow_weights(job, lane)
        logits = steps.run(sent)
        for send in job.plan.sends:
            send.put_all(job.plan.page_map)
        return logits.index_select(0, sent.arrays["kept"]), sent

    def _prefill(
        self, model: DeviceModel, job: Job, lane: PartitionLane, staging: Staging, draws: Draws
    ) -> tuple[Tensor, SentInputs]:
        """Asks for a prefill. Returns what `_decode` does. One that sends K and V layer by layer, or looks
        for tasks of others in between, is not recorded."""
        prefills = self._prefills[job.model, lane]
        arrays = None if job.plan.sends or self.loans.polls else prefills.arrays(job)
        if arrays is not None:
            sent = self._send(model, job, lane, staging, arrays | draws.arrays)
            return prefills.run(sent, job.kept.size), sent
        sent = self._send(model, job, lane, staging, prefill_inputs(job) | draws.arrays)
        self._follow_weights(job, lane, 0)

        def written(layer: int) -> None:
            self._follow_weights(job, lane, layer + 1)
            for send in job.plan.sends:
                send.put(job.plan.page_map, layer)

        return run_prefill(model, sent.arrays, lane.compute, written, self.loans.poll), sent

    def _follow_weights(self, job: Job, lane: PartitionLane, layer: int | None = None) -> None:
        """Lets the lane wait for the weights up to and with a layer's, or for all, if they are being read."""
        if self.weights is not None:
            self.weights.follow(job.model, lane, layer)


def _settle(lane: PartitionLane) -> None:
    """Waits for the work that was asked for, because it may still write to blocks that others are about to
    get. The lane's lock is held: an event in the middle of another thread's recording would be recorded."""
    with lane.lock:
        mark = lane.mark()
    mark.wait()


def _landed(tokens: Tensor, mark: StreamEvent) -> list[int]:
    """Returns tokens on their way to the host, once they are there."""
    mark.wait()
    found: list[int] = tokens.tolist()
    return found


def _sizes(model: DeviceModel, most: int) -> list[int]:
    """Returns the sizes of decode steps to record for up to `most` sequences: the largest, the one with the
    most numbers in its tables, which FlashAttention keeps for all layers, and then the others."""
    sizes = buckets_up_to(most)
    widest = max(sizes, key=lambda size: size * model.widest(size))
    return list(dict.fromkeys((sizes[0], widest, *sizes)))
