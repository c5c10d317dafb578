"""Models of real shapes with random weights, made on the device; executors and engines over them; and
requests to these engines, with how late the loop is that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
import transformers

from kvloom.engine.engine import Engine
from kvloom.exec.attention import NAME, Modular
from kvloom.exec.cuda.device import Cut, GpuDevice, Side, cut_green
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.layers import fuse_on_device
from kvloom.exec.cuda.loader import DeviceArena, open_gpu
from kvloom.exec.cuda.model import DeviceModel
from kvloom.exec.cuda.operations import Operations
from kvloom.exec.loader import LoadedModel
from kvloom.kv.arena import Arena, ArenaMemory
from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.offload.terms import OffloadBackend
from kvloom.transfer.shared_memory import ShmTransport
from kvloom.types.clock import Clock, WallClock
from kvloom.types.errors import KvloomError
from kvloom.types.geometry import Geometry
from kvloom.types.request import EndEvent, ModelCard, SamplingParams, StartGenerate, TokenEvent
from kvloom.types.spec import EngineSpec, ModelSpec, Policy
from kvloom.types.transfer import Transport

BLOCK_BYTES: Final = 16 << 10
CONTEXT: Final = 16384


@dataclass(frozen=True)
class Shape:
    """kind: transformers' class of its config."""

    kind: str
    form: dict[str, Any]

    def config(self) -> Any:
        return getattr(transformers, self.kind)(**({"max_position_embeddings": CONTEXT} | self.form))


def _shape(
    kind: str, hidden: int, inner: int, layers: int, head_dim: int, vocab: int, *, tied: bool
) -> Shape:
    return Shape(
        kind,
        {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "tie_word_embeddings": tied,
        },
    )


LLAMA_8B: Final = _shape("LlamaConfig", 4096, 14336, 32, 128, 128256, tied=False)
LLAMA_1B: Final = _shape("LlamaConfig", 2048, 8192, 16, 64, 128256, tied=True)
QWEN_4B: Final = _shape("Qwen3Config", 2560, 9728, 36, 128, 151936, tied=True)


@dataclass(frozen=True)
class Ground:
    """What models run on."""

    device: GpuDevice
    operations: Operations
    dtype: torch.dtype
    block_bytes: int = BLOCK_BYTES

    def arena(self, size: int) -> DeviceArena:
        """Of so many bytes, in whole blocks."""
        return DeviceArena(size // self.block_bytes, self.block_bytes, self.device.torch)


def halves(device: torch.device, count: int, operations: Operations) -> Sequence[tuple[Side, Side]]:
    """A `Cut`: of the pairs that a unit has the halves alone. Without planned shares adbs takes no other, and
    steps are recorded, and kernels compiled, for a third of the lanes."""
    return cut_green(device, count, operations, (1 / 2,))


def cuda_ground(cut: Cut = halves) -> Ground:
    """The first GPU, with the kernels that a unit has. Raises ConfigError where it cannot be used."""
    return Ground(*open_gpu("cuda:0", cut), torch.bfloat16)


def make_module(shape: Shape, device: torch.device, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, attn_implementation=attention
        )
    made: torch.nn.Module = module.eval().requires_grad_(False)
    return made


def make_models(shapes: Mapping[str, Shape], ground: Ground) -> dict[str, LoadedModel]:
    """As the loader makes them of checkpoints, but for its proof."""
    return {name: _make(name, shape, ground) for name, shape in shapes.items()}


def _make(name: str, shape: Shape, ground: Ground) -> LoadedModel:
    module = make_module(shape, ground.device.torch, ground.dtype, "eager")
    module.set_attn_implementation(NAME)  # type: ignore[operator]
    fuse_on_device(module, ground.operations)
    config = shape.config()
    form = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, ground.dtype.itemsize
    geometry = Geometry(*form, ground.block_bytes)
    card = _card(name, config, module, ground.dtype)
    return LoadedModel(
        module, Modular(module), ground.dtype, geometry, card, heads=config.num_attention_heads
    )


def executor_of(
    loaded: Mapping[str, LoadedModel],
    arena: ArenaMemory,
    ground: Ground,
    *,
    most_running: int,
    chunk: int,
    device: GpuDevice | None = None,
) -> GpuExecutor:
    """Ready for jobs. device: with other partitions than the ground's. Executors may share weights."""
    device = device or ground.device
    models = {name: DeviceModel.place(one, arena, ground.operations) for name, one in loaded.items()}
    executor = GpuExecutor(models, arena, device)
    executor.prepare(most_running=most_running, chunk=chunk, progress=_told)
    for name, model in models.items():
        flash = model.operations.flash
        _told(f"{name} attends by {'kvloom' if flash is None else flash.name}'s kernels")
    return executor


def _told(text: str) -> None:
    print(f"   {text}", flush=True)


def spec_of(
    executor: GpuExecutor, policy: Policy, *, max_running: int, chunk: int, unit: str = "unit-0"
) -> EngineSpec:
    return EngineSpec(
        models=tuple(ModelSpec(name=name, path="random") for name in executor.cards),
        kv_bytes=executor.blocks * executor.arena.block_bytes,
        block_bytes=executor.arena.block_bytes,
        policy=policy,
        max_running=max_running,
        max_waiting=4096,
        chunk_tokens=chunk,
        threads=1,
        unit=unit,
    )


class Plane(Transport, Protocol):
    def close_all(self) -> None: ...


@asynccontextmanager
async def running(
    executor: GpuExecutor,
    spec: EngineSpec,
    transport: Plane | None = None,
    offload: OffloadBackend | None = None,
) -> AsyncIterator[Engine]:
    """An engine over the executor while it runs; without a transport, apart from others."""
    plane = transport or ShmTransport(spec.unit, Arena(1, spec.block_bytes))
    engine = Engine(executor, plane, spec, WallClock(), offload)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
    plane.close_all()


def parameters(loaded: LoadedModel) -> int:
    """That a step reads: all but the embedding's table, which is the head's too where they are tied."""
    config: Any = loaded.module.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return loaded.card.parameters - table


def _card(name: str, config: Any, module: torch.nn.Module, dtype: torch.dtype) -> ModelCard:
    return ModelCard(
        name=name,
        path="random",
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        tokenizer="",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture=type(module).__name__,
        parameters=sum(one.numel() for one in module.parameters()),
        dtype=str(dtype).removeprefix("torch."),
    )


_INTERVAL = 8  # tokens of a frame: this process reads them all


class Failed(Exception):
    """A request that was let in has ended with an error."""


async def answered(engine: Engine, body: StartGenerate, token: Callable[[], None] = lambda: None) -> int:
    """How many tokens came; `token` is called for each. Raises Failed, or
    KvloomError where it is not let in."""
    count = 0
    async with aclosing(engine.start_generate(body)) as frames:
        async for frame in frames:
            for event in frame:
                if isinstance(event, TokenEvent):
                    count += 1
                    token()
                elif isinstance(event, EndEvent) and event.reason == "error":
                    raise Failed(event.message)
    return count


class InProcess:
    """Satisfies the `Asked` of `lab/bench/run.py`. engines: by model. tokens: that have come, of all."""

    def __init__(self, engines: Mapping[str, Engine], prompts: Prompts, clock: Clock) -> None:
        self.tokens = 0
        self._engines = engines
        self._prompts = prompts
        self._clock = clock

    def body(self, number: int, ask: WorkloadRequest) -> bytes:
        params = SamplingParams(max_tokens=ask.output, seed=0)
        prompt = self._prompts(number, ask)
        made = StartGenerate(
            model=ask.model, request=str(number), prompt=prompt, sampling=params, interval=_INTERVAL
        )
        return msgspec.msgpack.encode(made)

    async def ask(self, ask: WorkloadRequest, body: bytes, due: float) -> RequestResult:
        asked = msgspec.msgpack.decode(body, type=StartGenerate)
        first: float | None = None
        count = 0

        def came() -> None:
            nonlocal first, count
            first = self._clock.now() - due if first is None else first
            count += 1
            self.tokens += 1

        try:
            await answered(self._engines[ask.model], asked, came)
        except (KvloomError, Failed) as error:
            said = f"{type(error).__name__}: {error}"
            return RequestResult(request=ask, first=first, end=None, tokens=count, error=said)
        return RequestResult(request=ask, first=first, end=self._clock.now() - due, tokens=count)


async def many(count: int, engine: Engine, make: Callable[[int, int], StartGenerate]) -> None:
    """So many requests at any time, for ever: `make(number, turn)` is followed by its next turn."""

    async def again(number: int) -> None:
        turn = 0
        while True:
            await answered(engine, make(number, turn))
            turn += 1

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(again(number))


_EVERY: Final = 0.01  # seconds


class Lag:
    """Of a loop while it is `watched`: seconds by which each of many timers was late."""

    def __init__(self) -> None:
        self.late: list[float] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """On the loop's own thread."""
        loop = asyncio.get_running_loop()

        def again() -> asyncio.TimerHandle:
            due = loop.time() + _EVERY
            return loop.call_at(due, look, due)

        def look(due: float) -> None:
            self.late.append(loop.time() - due)
            timers[:] = [again()]

        timers = [again()]
        try:
            yield
        finally:
            timers[0].cancel()

    def told(self) -> str:
        if not self.late:
            return "the loop's timers never ran"
        typical, worst = (float(np.percentile(self.late, part)) * 1e3 for part in (50, 99))
        return f"timers late by {typical:.1f} ms (median), {worst:.1f} ms (P99)"
