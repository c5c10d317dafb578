"""What the largest steps take of a device's memory, by the bytes of their tensors: for models of real shapes
on tensors without memory, and for small ones against what torch takes of the CPU's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import pytest
import torch
from tools.gpu_checks.models import LLAMA_1B, LLAMA_8B, QWEN_4B, Ground, Shape, make_models
from torch import Tensor

from kvloom.config.config import Config
from kvloom.exec.cuda.device import HostStream, PartitionLane, Partitions, Recording
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.memory_need import MemoryNeed
from kvloom.exec.cuda.model import DecodeState, DeviceModel, Places
from kvloom.exec.cuda.operations import Operations
from kvloom.exec.cuda.prefill import run_prefill
from kvloom.exec.sampler import prompt_logprobs, sample
from kvloom.kernels.cuda.flash import FlashAttention
from kvloom.types.job import PromptRow, SampleRow
from kvloom.types.request import SamplingParams
from kvloom.types.spec import GPU_CHUNK_TOKENS
from tests.exec.cuda.counted import CountedDevice, MemoryCount, counted_device
from tests.exec.cuda.devices import COMPUTE

ROWS, CHUNK = Config.model_fields["max_running"].default, GPU_CHUNK_TOKENS
PAGE_OF_ANY = 8 << 20
DRAWN = SamplingParams(max_tokens=1, seed=0, temperature=1.0, logprobs=5, logit_bias={1: 1.0})
TINY = Shape(
    "LlamaConfig",
    {
        "vocab_size": 2000,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
)

SMALL = Shape(
    "LlamaConfig",
    {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
)
SMALL_BLOCK = 1 << 10
SMALL_ROWS = 48
COLUMNS = 4 * 8 * 4 * SMALL_ROWS * 16  # bytes of the tables of so many sequences of 16 pages


def shapes_alone() -> Operations:
    """Returns operations that take what the GPU's kernels take, but a decode step's workspace, and compute
    nothing."""

    def nothing(*_: Any, **__: Any) -> None: ...

    def norm(x: Tensor, *_: Any) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def gated(x: Tensor, _: str) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    made: dict[str, Any] = {one.name: nothing for one in fields(Operations)}
    computing = {"rms_norm": norm, "add_rms_norm": norm, "gated": gated}
    return Operations(**made | computing | {"flash": None})


@pytest.fixture(autouse=True)
def draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw takes what the GPU's kernel takes."""

    def draw(logits: Tensor, *_: Tensor) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    monkeypatch.setattr("kvloom.exec.sampler._kernel_of", lambda device: draw)


@dataclass
class Loaded:
    """A model of random weights in a pool of a few pages on a device that is counted."""

    count: MemoryCount
    device: CountedDevice
    model: DeviceModel
    executor: GpuExecutor

    @classmethod
    def of(cls, shape: Shape, kind: str, dtype: torch.dtype, count: MemoryCount) -> Self:
        """kind: of the device. This thread is watched by `count`."""
        device = counted_device(count, kind)
        ground = Ground(device, shapes_alone(), dtype)
        arena = ground.arena(PAGE_OF_ANY)
        model = DeviceModel.place(make_models({"m": shape}, ground)["m"], arena, ground.operations)
        return cls(count, device, model, GpuExecutor({"m": model}, arena, device))

    def need(self, rows: int, chunk: int) -> MemoryNeed:
        found = self.executor.measure(most_running=rows, chunk=chunk, taken=self.device.held)
        self.executor.close()
        return found

    def taken(self, work: Callable[[], object]) -> int:
        """Returns the most bytes that are live at a time while work is done, beside those that are now."""
        self.count.trim()
        before = self.count.live
        with torch.inference_mode():
            work()
        return self.count.peak - before

    def prefill(self, chunk: int, sequences: int = 1, pages: int = 32) -> None:
        """Prompts of `chunk` tokens together, each of whose log-probabilities is asked for."""
        many, few = self._ints(chunk), {"starts": sequences, "cu_seqlens": sequences + 1}
        arrays = {"tokens": many, "positions": many, "kept": many}
        arrays |= {name: many.int() for name in ("slot_page", "slot_offset")}
        arrays |= {name: self._ints(count).int() for name, count in few.items()}
        arrays["tables"] = self._ints(sequences, pages).int()
        logits = run_prefill(self.model, arrays, COMPUTE)
        prompt_logprobs(logits, [PromptRow(i, 0, 5) for i in range(chunk)])

    def decode(self, rows: int) -> None:
        """A step of so many sequences, and their draws."""
        each = self._ints(rows)
        tables, ints = self._ints(rows, 32).int(), each.int()
        places = Places(self.model.arena, self.model.page_map.blocks, tables, ints, ints)
        state = DecodeState(self.model.operations, places, ints, COMPUTE)
        sample(self.model.logits(each, each, state), [SampleRow(i, i, 0, DRAWN) for i in range(rows)])

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device.torch)


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_1B, QWEN_4B], ids=["llama-8b", "llama-1b", "qwen-4b"])
def test_what_is_measured_holds_a_prefill_and_a_decode_step_of_real_shapes_at_once(shape: Shape) -> None:
    """At the default settings. No weight has memory."""
    count, nowhere = MemoryCount(), torch.device("meta")
    with count.watching(nowhere):
        loaded = Loaded.of(shape, "meta", torch.bfloat16, count)
        need = loaded.need(ROWS, CHUNK)
        prefill, decode = (
            loaded.taken(lambda: loaded.prefill(CHUNK)),
            loaded.taken(lambda: loaded.decode(ROWS)),
        )
    numbers = shape.form["vocab_size"]
    assert prefill > CHUNK * numbers * 2, "the logits of a chunk, in bfloat16"
    assert decode > ROWS * numbers * (2 + 4 + 4), "those of a step, in float32, and a copy that is bent"
    assert prefill + decode < need.running < 3 * (prefill + decode)
    inputs = len(loaded.executor.lanes) * ROWS * numbers * 2
    assert inputs < need.kept < inputs + (1 << 28), "a lane's logits, and little else"


class PoolStream(HostStream):
    """Its recordings have a pool of memory, as large as the largest needs it, and each has some beside."""

    def __init__(self, count: MemoryCount) -> None:
        self._count = count
        self._size = 0

    def record(self, work: Callable[[], None]) -> Recording:
        before, self._count.peak = self._count.live, self._count.live
        work()
        most = max(self._size, self._count.peak - before)
        self._count.add(most - self._size + 1000)
        self._size = most
        return super().record(work)


@pytest.mark.parametrize(
    ("room", "context"), [(COLUMNS - 1, 1 << 16), (2 * COLUMNS - 1, 1 << 11), (1 << 30, 1 << 16)]
)
def test_what_is_measured_holds_the_largest_tables_of_flash_attention(room: int, context: int) -> None:
    """The largest batch has none, or smaller ones than a batch of half its size, or the largest."""

    def attend(q: Tensor, *_: Any, **__: Any) -> Tensor:
        return q.new_empty(q.shape)

    flash = FlashAttention("shapes alone", attend, COMPUTE, room=room)
    count, nowhere = MemoryCount(), torch.device("meta")

    def load() -> Loaded:
        device = replace(
            counted_device(count, "meta"),
            partitions=Partitions(PartitionLane(COMPUTE, PoolStream(count)), []),
        )
        ground = Ground(device, replace(shapes_alone(), flash=flash), torch.bfloat16, SMALL_BLOCK)
        arena = ground.arena(1 << 20)
        shape = replace(SMALL, form=SMALL.form | {"max_position_embeddings": context})
        made = make_models({"m": shape}, ground)["m"]
        model = DeviceModel.place(made, arena, ground.operations, flash=True)
        return Loaded(count, device, model, GpuExecutor({"m": model}, arena, device))

    with count.watching(nowhere):
        need = load().need(SMALL_ROWS, SMALL_ROWS)
        gc.collect()  # what it was measured with
        served = load()
        before = count.live
        served.executor.prepare(most_running=SMALL_ROWS, chunk=SMALL_ROWS)
        kept = count.live - before
        forms = [(SMALL_ROWS, n, served.model.widest(n + 1)) for n in range(1, SMALL_ROWS + 1)]
        prefills = [served.taken(partial(served.prefill, *form)) for form in forms]
    assert need.flash == {"m"}
    assert kept <= need.kept < kept + 10_000
    assert max(prefills) <= need.running


def test_tensors_without_memory_are_counted_as_real_ones() -> None:
    found = []
    for kind in ("meta", "cpu"):
        count = MemoryCount()
        with count.watching(torch.device(kind)):
            found.append(Loaded.of(TINY, kind, torch.float32, count).need(24, 48))
    assert found[0] == found[1]
    assert found[0].running > 48 * 2000 * 4


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_the_count_is_what_torch_takes_of_the_cpu(step: str) -> None:
    """By torch's own profiler, which sees what kernels take within, too."""
    count = MemoryCount()
    with count.watching(torch.device("cpu")):
        loaded = Loaded.of(TINY, "cpu", torch.float32, count)
        counted = loaded.taken(lambda: getattr(loaded, step)(48))
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profiler:
        getattr(loaded, step)(48)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns())
    most = max(accumulate(one.nbytes() for one in changes))
    assert 0.9 * most <= counted <= most
