"""A device that is only known by its cost: jobs take as long as a cost model says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvloom.core.geometry import Geometry
from kvloom.core.job import Job, JobResult
from kvloom.core.request import ModelCard, TokenLogprob
from kvloom.cost.work import CostModel, Work


class Content(Protocol):
    """What jobs write and read; how long they take is not its matter."""

    def begin(self, job: Job) -> None:
        """The job has started: its copies of pages are made."""

    def write(self, job: Job, layers: range) -> None:
        """The job has computed K and V of these layers."""

    def draw(self, job: Job) -> list[int]:
        """The tokens that its samples ask for."""


class NoContent:
    """Satisfies `Content`: nothing is written, and each draw gives a number of its own."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self._vocab = vocab

    def begin(self, job: Job) -> None:
        """Pages hold nothing."""

    def write(self, job: Job, layers: range) -> None:
        """Pages hold nothing."""

    def draw(self, job: Job) -> list[int]:
        size = self._vocab[job.model]
        return [(sample.key + 7919 * sample.index) % size for sample in job.samples]


@dataclass(slots=True, eq=False)
class _Running:
    """left: the part of it that is still to do, at `since`; seconds: all of it beside what runs now. layers:
    that are written. timer: the end of the next layer that a peer waits for, or of the job."""

    job: Job
    work: Work
    future: asyncio.Future[JobResult]
    started: float
    since: float
    left: float = 1.0
    seconds: float = 0.0
    layers: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def all_layers(self) -> int:
        return int(self.job.plan.page_map.shape[1])


class ModelledExecutor:
    """Satisfies `Executor`. Jobs that run at the same time slow each other down as the cost model says,
    each for as long as they do. A job whose plan has sends puts each layer when it is computed.

    compute: units to share out. blocks: in the arena.
    """

    def __init__(
        self,
        cards: dict[str, ModelCard],
        geometries: dict[str, Geometry],
        *,
        blocks: int,
        compute: int,
        cost: CostModel,
        content: Content | None = None,
    ) -> None:
        self.cards = cards
        self.geometries = geometries
        self.blocks = blocks
        self.compute = compute
        self._cost = cost
        self._content = content or NoContent({name: card.vocab_size for name, card in cards.items()})
        self._running: list[_Running] = []

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        loop, plan = asyncio.get_running_loop(), job.plan
        share = min(1.0, job.share / self.compute)
        work = Work.of(job.model, job.phase, share, plan.appends, plan.starts, len(job.samples))
        running = _Running(job, work, loop.create_future(), loop.time(), loop.time())
        self._running.append(running)
        self._content.begin(job)
        self._pace(loop)
        return running.future

    def _pace(self, loop: asyncio.AbstractEventLoop) -> None:
        """What runs has changed, and so has the time that each still takes."""
        now = loop.time()
        for running in self._running:
            if running.seconds:
                running.left = max(0.0, running.left - (now - running.since) / running.seconds)
            running.since = now
            beside = [other.work for other in self._running if other is not running]
            running.seconds = self._cost.seconds(running.work, beside)
            self._wait(running, loop)

    def _wait(self, running: _Running, loop: asyncio.AbstractEventLoop) -> None:
        """For the next layer that a peer waits for, or for the end."""
        layer = running.layers + 1 if running.job.plan.sends else running.all_layers
        after = 1.0 - layer / running.all_layers  # the part of the job that follows on it
        due = running.since + max(0.0, running.left - after) * running.seconds
        if running.timer is not None:
            running.timer.cancel()
        running.timer = loop.call_at(due, self._computed, running, layer)

    def _computed(self, running: _Running, layer: int) -> None:
        loop, job = asyncio.get_running_loop(), running.job
        self._content.write(job, range(running.layers, layer))
        for at in range(running.layers, layer if job.plan.sends else 0):
            for send in job.plan.sends:
                send.shipment.put(send.parcel(job.plan.page_map, at))
        running.layers = layer
        if layer < running.all_layers:
            self._wait(running, loop)
            return
        self._running.remove(running)
        self._pace(loop)
        running.future.set_result(self._result(running, loop.time()))

    def _result(self, running: _Running, now: float) -> JobResult:
        tokens = self._content.draw(running.job)
        prompts = [TokenLogprob(0.0) for _ in running.job.prompts]
        return JobResult(tokens, [None] * len(tokens), prompts, now - running.started)
