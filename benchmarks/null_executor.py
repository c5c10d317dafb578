"""An executor whose device takes no time, or a given time: what is left is the engine's own work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from tools.make_checkpoint import EOS, SHAPES

from benchmarks.places import checkpoint
from kvloom.types.address import Endpoint, KVAddress, Ticket
from kvloom.types.errors import Unavailable
from kvloom.types.geometry import Geometry
from kvloom.types.job import Job, JobResult, Phase
from kvloom.types.request import ModelCard
from kvloom.types.spec import EngineSpec, ModelSpec, Policy
from kvloom.types.transfer import Transfer, TransferMeter

BLOCK_BYTES = 16 << 10
CATCH_UP = 0.5  # seconds
LETTERS = range(64, 90)  # printable in the checkpoints' byte-level vocabulary


class Clockwork:
    """Watches jobs start and end. Once `sequences` sequences run, it times the next `steps` jobs.

    gaps: from a job's end to the next one's start, in seconds of the engine's own thread; work: seconds of
    CPU that the whole process took for them."""

    def __init__(self, sequences: int = 0, steps: int = 0) -> None:
        self.gaps: list[float] = []
        self.work = 0.0
        self.done = asyncio.Event()
        self._missing = sequences
        self._steps = steps
        self._ended: float | None = None

    def start(self, job: Job) -> None:
        if self.done.is_set():
            return
        if self._missing > 0:
            self._missing -= sum(row.index == 0 for row in job.samples)
            self.work = -time.process_time()
            return
        if self._ended is not None:
            self.gaps.append(time.thread_time() - self._ended)
            self._ended = None
        if len(self.gaps) == self._steps:
            self.work += time.process_time()
            self.done.set()

    def end(self) -> None:
        self._ended = time.thread_time()


class NullExecutor:
    """Answers each job with letters on the event loop's next turn; a decode job `period` seconds after the
    one before, where there is a period."""

    def __init__(
        self,
        shapes: Mapping[str, str],
        *,
        blocks: int,
        compute: int,
        period: float = 0.0,
        clockwork: Clockwork | None = None,
        context: int | None = None,
    ) -> None:
        """context: tokens of the models' longest sequence, if it is not the checkpoints'."""
        self.cards = {name: _card(name, shape, context) for name, shape in shapes.items()}
        self.geometries = {name: _geometry(shape) for name, shape in shapes.items()}
        self.blocks = blocks
        self.compute = compute
        self.max_steps, self.lookahead = 1, 0
        self.weights = None
        self.adapters = None
        self._clockwork = clockwork or Clockwork()
        self._period = period
        self._due = 0.0

    def steps_begun(self, job: Job) -> int:
        return job.steps

    def cut(self, job: Job) -> None:
        """Each has one step."""

    def launch(self, job: Job) -> asyncio.Future[JobResult]:
        self._clockwork.start(job)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[JobResult] = loop.create_future()
        tokens = [LETTERS[row.index % len(LETTERS)] for row in job.samples]
        result = JobResult(tokens, [None] * len(tokens), [], 0.0)
        if self._period and job.phase is Phase.DECODE:
            late = loop.time() - self._due  # a little is caught up; after a pause the clock starts anew
            self._due += self._period if late < CATCH_UP else late
            loop.call_at(self._due, self._end, future, result)
        else:
            loop.call_soon(self._end, future, result)
        return future

    def _end(self, future: asyncio.Future[JobResult], result: JobResult) -> None:
        self._clockwork.end()
        future.set_result(result)


class NullTransport:
    """A plane on which nobody can be reached."""

    endpoint = Endpoint(unit="null", kind="modelled", where=b"")
    meter = TransferMeter()

    def open(self, begin: int, digest: int, blocks: bytes = b"") -> Ticket:
        raise Unavailable("a null engine has nowhere to receive")

    def received(self, ticket: Ticket) -> int:
        raise NotImplementedError

    def close(self, ticket: Ticket) -> bool:
        raise NotImplementedError

    def claim(self, peer: Endpoint, address: KVAddress, digest: int, begin: int, end: int) -> Transfer:
        raise Unavailable("a null engine has nothing to send")

    def close_all(self) -> None:
        pass


def null_spec(shapes: Mapping[str, str], *, blocks: int, policy: Policy = "adbs") -> EngineSpec:
    return EngineSpec(
        models=tuple(ModelSpec(name=name, path=shape) for name, shape in shapes.items()),
        kv_bytes=blocks * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        policy=policy,
        max_running=256,
        max_waiting=1 << 16,
        chunk_tokens=512,
        threads=2,
    )


def _geometry(shape: str) -> Geometry:
    sizes = SHAPES[shape]
    return Geometry(sizes.layers, sizes.kv_heads, sizes.hidden // sizes.heads, 4, BLOCK_BYTES)


def _card(name: str, shape: str, context: int | None) -> ModelCard:
    path = checkpoint(shape)
    return ModelCard(
        name=name,
        path=str(path),
        context_length=context or SHAPES[shape].context,
        vocab_size=SHAPES[shape].vocab,
        tokenizer=(path / "tokenizer.json").read_text("utf-8"),
        chat_template=(path / "chat_template.jinja").read_text("utf-8"),
        special_tokens={"eos_token": "</s>"},
        eos_token_ids=(EOS,),
        bos_token_id=None,
        add_bos=False,
        architecture="LlamaForCausalLM",
        parameters=0,
        dtype="float32",
    )
