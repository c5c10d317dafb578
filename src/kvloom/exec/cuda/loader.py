"""Loading for a GPU: an executor that is ready to run jobs."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.exec.attention import Forward, Scoring
from kvloom.exec.cuda.device import Cut, GpuDevice, cuda_device, cut_green
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.granules import DriverCalls, GranuleArena, Granules
from kvloom.exec.cuda.layers import (
    fuse_on_device,
    hold_plainly,
    move_quantized,
    quantized_tensors,
    round_inputs,
)
from kvloom.exec.cuda.memory_need import MemoryNeed
from kvloom.exec.cuda.model import DeviceModel
from kvloom.exec.cuda.operations import Operations, triton_operations
from kvloom.exec.cuda.weights import GpuWeights, SleepingWeights
from kvloom.exec.loader import LoadedModel, count_blocks, load_models
from kvloom.exec.parallel.group import RankGroup, RankTeam
from kvloom.kernels.cuda.flash import find_flash
from kvloom.kernels.cuda.reference import FP8_CAPABILITY
from kvloom.kernels.driver import Driver, DriverError
from kvloom.kv.arena import ArenaMemory, view_blocks
from kvloom.offload.cuda import require_lenders
from kvloom.types.errors import ConfigError, Unavailable
from kvloom.types.geometry import Geometry, KVDtype
from kvloom.types.spec import EngineSpec, gpu_index

_log = logging.getLogger(__name__)
_HALVES: Final = ("bfloat16", "float16")
_FP8: Final[KVDtype] = "float8_e4m3fn"


class DeviceTarget:
    """A GPU as the target of loading: weights go from the mapped files straight to the device, each once, and
    of a rank its slices."""

    def __init__(self, device: GpuDevice, operations: Operations, pool: int = 0, ranks: int = 1) -> None:
        """pool: bytes that are to be taken on the device beside the weights, as far as they are known. ranks:
        the number of ranks that share the weights."""
        self._device = device
        self._operations = operations
        self._pool = pool
        self._ranks = ranks

    @property
    def _capability(self) -> tuple[int, int]:
        here = self._device.torch
        return torch.cuda.get_device_capability(here) if here.type == "cuda" else FP8_CAPABILITY

    def own_format(self, config: Any, matrices: Callable[[], Set[str]]) -> torch.dtype:
        """Returns the checkpoint's own format if that is a half precision, else bfloat16."""
        if self._device.torch.type == "cpu":
            return torch.float32
        own = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return getattr(torch, own) if own in _HALVES else torch.bfloat16

    def choose_format(self, own: torch.dtype, outline: nn.Module, say: Callable[[str], None]) -> torch.dtype:
        return own

    def widens(self, outline: nn.Module, dtype: torch.dtype) -> bool:
        return False  # a GPU multiplies in the format of its weights

    def kv_dtype(self, wanted: KVDtype, dtype: torch.dtype) -> torch.dtype:
        """Returns `dtype` or FP8, which are the only ones that the kernels of GPUs attend over."""
        own = str(dtype).removeprefix("torch.")
        fits = self._capability >= FP8_CAPABILITY
        if wanted == _FP8 and fits:
            return torch.float8_e4m3fn
        if wanted not in ("auto", own):
            raise ConfigError(
                f"kv_dtype: {wanted} on {self._device.torch}, a GPU of compute capability "
                f"{'.'.join(map(str, self._capability))}; `auto`, {own} (in which the model computes) "
                f"{'or ' + _FP8 if fits else 'or, from 8.9 on, ' + _FP8} is right"
            )
        return dtype

    def check_room(self, size: int) -> None:
        self._refuse(size // self._ranks)

    def check_floats(self) -> None:
        if self._capability < FP8_CAPABILITY:
            raise ConfigError(
                f"its weights are floats of 8 bits (FP8), and {self._device.torch} has compute capability "
                f"{'.'.join(map(str, self._capability))}; 8.9 or newer, or weights of 4 or 8 bits that are "
                "integers, are right"
            )

    def check_pooling_model(self) -> None:
        raise ConfigError("it makes vectors of texts, which CPUs serve; `device: cpu` is right")

    def place(self, module: nn.Module) -> None:
        hold_plainly(module)
        held = (*module.parameters(), *module.buffers(), *quantized_tensors(module))
        tensors = {id(one): one for one in held}
        coming = [one for one in tensors.values() if one.device.type == "cpu"]
        self._refuse(sum(one.numel() * one.itemsize for one in coming))
        module.to(self._device.torch)
        move_quantized(module, self._device.torch)

    def _refuse(self, size: int) -> None:
        """Raises ConfigError if weights of `size` bytes do not fit beside the pool."""
        free, total = self._device.free()
        if size + self._pool > free:
            beside = f" beside a pool of {self._pool:,}" if self._pool else ""
            raise ConfigError(
                f"its weights need {size:,} bytes{beside}, and {free:,} of {total:,} are free on "
                f"{self._device.torch}; a smaller model, a half precision or a larger device is right"
            )

    def fuse(self, module: nn.Module) -> None:
        fuse_on_device(module, self._operations)

    def settle(self, module: nn.Module) -> None:
        self._device.trim()

    def check_scorings(self, scorings: Mapping[int, Scoring]) -> None:
        for name in ("sinks", "slopes"):
            if any(getattr(one, name) is not None for one in scorings.values()):
                raise ConfigError(
                    f"its attention has {name}, which GPU kernels do not compute; `device: cpu` is right"
                )

    def fuse_decoder(
        self, module: nn.Module, scorings: Mapping[int, Scoring], geometry: Geometry
    ) -> Forward | None:
        """Returns None: transformers' modules cost nothing in a recording."""
        return None

    def round_inputs(self, module: nn.Module) -> None:
        """Lets products over weights in FP8 round their inputs to it. All others multiply in the format that
        the model computes in."""
        round_inputs(module)


class DeviceArena:
    """The pool's memory on a device: `blocks` × `block_bytes` bytes. It is never resized, because peers and
    recorded graphs hold its address."""

    def __init__(self, blocks: int, block_bytes: int, device: torch.device) -> None:
        """Raises ConfigError, which tells the bytes that are wanted, if the device does not have them."""
        self.blocks = blocks
        self.block_bytes = block_bytes
        size = blocks * block_bytes
        try:
            self.bytes: Tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_memory: {device} gives no {size:,} bytes in one piece for the pool; less is right"
            ) from error

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Returns the arena as one model sees it: [blocks, 2, tokens, head_dim]."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)


SPARE: Final = 0.02
"""The part of the device's memory that `kv_memory: auto` leaves beside what was measured: recordings that a
loan needs are made later, and torch's allocator has gaps."""
_ENTRY: Final = 4  # bytes of a block in a model's page map
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS", "32"  # streams that share one, of 8, wait for each other
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def load_gpu_executor(spec: EngineSpec, progress: Callable[[str], None] = lambda _: None) -> GpuExecutor:
    """Loads a unit of one GPU. Raises ConfigError with what the device lacks."""
    progress(f"opening {spec.device}")
    device, operations = open_gpu(spec.device, cut=cut_green)
    if spec.weave is not None:
        require_lenders(_open_driver("weave"), device.torch, spec.weave.gpus)
    if spec.sleep_dir:
        return load_within_budget(spec, device, operations, _open_driver("memory"), progress)
    return load_executor(spec, device, operations, progress)


def _open_driver(what: str) -> Driver:
    try:
        return Driver()
    except DriverError as error:
        raise ConfigError(f"{what}: {error}; pip install '.[gpu]' in kvloom's checkout is right") from error


def open_gpu(name: str, cut: Cut, rank: int = 0) -> tuple[GpuDevice, Operations]:
    """Returns a rank's device and its kernels. name: the device of the unit's first rank; the others have the
    GPUs that follow it. cut: see `cuda_device`. Raises ConfigError."""
    refuse_expandable(os.environ)
    os.environ.setdefault(*_QUEUES)
    try:
        operations = triton_operations()
    except ImportError as error:
        raise ConfigError(
            f"device: Triton cannot be used here ({error}); pip install '.[gpu]' in kvloom's checkout, "
            "or `device: cpu`, is right"
        ) from error
    device = cuda_device(gpu_index(name) + rank, cut, operations)
    flash = find_flash(torch.cuda.get_device_capability(device.torch), device.compute)
    return device, replace(operations, flash=flash)


def load_executor(
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    progress: Callable[[str], None] = lambda _: None,
) -> GpuExecutor:
    """Loads every model, measures what jobs need, takes the pool, then rehearses. Raises ConfigError."""
    executor = GpuExecutor(*load_pool(spec, device, operations, progress), device)
    rehearse(executor, spec, device, progress)
    return executor


def load_within_budget(
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    driver: DriverCalls,
    progress: Callable[[str], None] = lambda _: None,
) -> GpuExecutor:
    """Loads every model and puts it to sleep before the next one is loaded. Weights and pool share the
    granules of the budget from then on. Raises ConfigError."""
    device.enter()
    granules = Granules(driver, device.torch, spec.block_bytes)
    asleep: dict[str, SleepingWeights] = {}

    def finish(name: str, model: LoadedModel) -> None:
        progress(f"putting {name} to sleep")
        asleep[name] = SleepingWeights(model.module, granules, device)

    target = DeviceTarget(device, operations)
    loaded = load_models(spec.models, spec.block_bytes, target, progress, finish=finish)
    count = spec.kv_bytes // granules.size
    for name, model in asleep.items():
        page = loaded[name].geometry.blocks_per_page * spec.block_bytes
        least = model.granules - (-page // granules.size)
        if least > count:
            raise ConfigError(
                f"memory: {spec.kv_bytes:,} bytes do not hold {name} and a page of its K and V, in pieces of "
                f"{granules.size:,}; at least {least * granules.size:,} are needed"
            )

    @contextmanager
    def awake(name: str) -> Iterator[None]:
        with granules.made(asleep[name].granules):
            while not asleep[name].read_part():
                pass
            yield
            device.settle()
            asleep[name].let_go()

    _, need = _check_room(loaded, spec, device, operations, progress, awake=awake)
    progress("taking the memory of weights and pool")
    granules.create(count)
    arena = GranuleArena(granules, count, spec.block_bytes)
    models = _place(loaded, arena, operations, need)
    executor = GpuExecutor(models, arena, device, GpuWeights(asleep, arena, device))
    rehearse(executor, spec, device, progress)
    return executor


def load_pool(
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    progress: Callable[[str], None] = lambda _: None,
    team: RankTeam | None = None,
) -> tuple[dict[str, DeviceModel], DeviceArena]:
    """Returns the models, and the memory that they share; in a team this rank's slices, and an equal part of
    the pool, of as many blocks as each rank has. Raises ConfigError, and Unavailable if a rank is gone."""
    device.enter()
    ranks = spec.tensor_parallel
    if team is not None:  # Ranks would have to agree which of them can use the package.
        operations = replace(operations, flash=None)
    target = DeviceTarget(device, operations, spec.kv_bytes // ranks, ranks)
    loaded = load_models(spec.models, spec.block_bytes, target, progress, team)
    if spec.kv_bytes:
        count_blocks(loaded, spec.kv_bytes, spec.block_bytes, ranks)
    room, need = _check_room(loaded, spec, device, operations, progress, team)
    progress("taking the KV arena")
    blocks = count_blocks(loaded, spec.kv_bytes or room * ranks, spec.block_bytes, ranks)
    arena = DeviceArena(blocks, spec.block_bytes, device.torch)
    return _place(loaded, arena, operations, need), arena


def _place(
    loaded: Mapping[str, LoadedModel],
    arena: ArenaMemory,
    operations: Operations,
    need: MemoryNeed | None = None,
) -> dict[str, DeviceModel]:
    """need: the memory need that was measured for these models, if it was."""
    models = {}
    for name, model in loaded.items():
        records, flash = (True, None) if need is None else (name not in need.plain, name in need.flash)
        models[name] = DeviceModel.place(model, arena, operations, records=records, flash=flash)
    return models


def rehearse(
    executor: GpuExecutor,
    spec: EngineSpec,
    device: GpuDevice,
    progress: Callable[[str], None] = lambda _: None,
    team: RankTeam | None = None,
) -> None:
    """Makes the executor ready for jobs; see `GpuExecutor.prepare`. Raises ConfigError if memory is too
    little, Unavailable if ranks of a team differ."""
    agree = all_alike(None if team is None else team.group)
    try:
        executor.prepare(
            most_running=spec.max_running, chunk=spec.chunk_tokens, progress=progress, agree=agree
        )
    except torch.OutOfMemoryError as error:
        free, total = device.free()
        size = executor.arena.blocks * spec.block_bytes
        raise ConfigError(
            f"kv_memory: beside a pool of {size:,} bytes too little of {device.torch} is left to run jobs "
            f"({free:,} of {total:,} bytes); a smaller kv_memory, chunk_tokens or max_running is right"
        ) from error


def all_alike(group: RankGroup | None) -> Callable[[bool], bool]:
    """Returns a function that takes whether this rank has recorded a step, and returns it. It raises
    Unavailable if ranks differ in that, because their exchanges would differ. group: None if there is one
    rank."""

    def agree(recorded: bool) -> bool:
        if group is not None and group.agree(recorded) != recorded:
            raise Unavailable("decode steps could be recorded at some ranks and not at others")
        return recorded

    return agree


def _check_room(
    loaded: Mapping[str, LoadedModel],
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    progress: Callable[[str], None],
    team: RankTeam | None = None,
    awake: Callable[[str], AbstractContextManager[None]] | None = None,
) -> tuple[int, MemoryNeed]:
    """Returns the bytes that a pool may take on this device beside weights and jobs, which is the least of
    all ranks, and the memory that jobs need here. The log tells both. awake: see `GpuExecutor.measure`.
    Raises ConfigError if the config asks for more."""
    progress("measuring the memory that jobs need")
    device.trim()
    (free, total), key = device.free(), "kv_memory" if awake is None else "memory"
    left = f"weights leave {free:,} of the {total:,} bytes of {device.torch}"
    right = "smaller models, or a smaller chunk_tokens or max_running, are right"
    try:
        need = _measure(loaded, spec, device, operations, team, awake)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{key}: {left}, too little to run jobs; fewer or {right}") from error
    wanted = spec.kv_bytes // spec.tensor_parallel
    entries = 1 + _ENTRY * len(loaded) / spec.block_bytes  # page maps grow with the pool
    room = int((free - need.total - (0 if wanted else int(SPARE * total))) / entries)
    if team is not None:
        room = team.group.least(room)
    if room < max(wanted, 1):
        asked = f"the {wanted:,} that it asks for" if wanted else "a pool"
        fewer = "fewer bytes, " if wanted else ""
        raise ConfigError(f"{key}: {left}, {need}, and {max(room, 0):,} are left for {asked}; {fewer}{right}")
    given = f"{'the pool gets' if awake is None else 'weights and pool get'} {wanted or room:,}"
    _log.info("%s, and %s; of %s that are left %s", left, need, f"{room:,}", given)
    return room, need


def _measure(
    loaded: Mapping[str, LoadedModel],
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    team: RankTeam | None,
    awake: Callable[[str], AbstractContextManager[None]] | None,
) -> MemoryNeed:
    """Returns the memory that jobs need, measured in a pool of one page, and gives back all that this took. A
    unit whose pool is to have the rest of the device is alone there, so all memory that is taken meanwhile is
    its own, and counts. Beside other units only torch's memory counts. Raises torch's OutOfMemoryError."""
    total = device.free()[1]
    page = max(one.geometry.blocks_per_page for one in loaded.values())
    arena = DeviceArena(page, spec.block_bytes, device.torch)
    executor = GpuExecutor(_place(loaded, arena, operations), arena, device)
    try:
        return executor.measure(
            most_running=spec.max_running,
            chunk=spec.chunk_tokens,
            taken=device.held if spec.kv_bytes else lambda: total - device.free()[0],
            agree=all_alike(None if team is None else team.group),
            awake=awake,
        )
    finally:
        executor.close()
        del executor, arena
        gc.collect()  # recordings, and what they hold
        device.trim()


def refuse_expandable(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for expandable segments: peers cannot map what torch allocates in them."""
    for name in _SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ConfigError(
                f"{name}: expandable_segments:True; without it is right, for peers map the KV arena"
            )
