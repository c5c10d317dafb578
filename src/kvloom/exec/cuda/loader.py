"""Loading for a GPU: an executor that is ready to run jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.exec.attention import Forward, Scoring
from kvloom.exec.cuda.device import Cut, GpuDevice, cuda_device, cut_green
from kvloom.exec.cuda.executor import GpuExecutor
from kvloom.exec.cuda.fuse import fuse_on_device
from kvloom.exec.cuda.granules import DriverCalls, GranuleArena, Granules
from kvloom.exec.cuda.model import DeviceModel
from kvloom.exec.cuda.operations import Operations, triton_operations
from kvloom.exec.cuda.quantized import hold_plainly, move_quantized, quantized_tensors, round_inputs
from kvloom.exec.cuda.weights import GpuWeights, SleepingWeights
from kvloom.exec.loader import LoadedModel, count_blocks, load_models
from kvloom.exec.parallel.group import Team
from kvloom.kernels.driver import Driver, DriverError
from kvloom.kv.arena import view_blocks
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import Geometry, KVDtype
from kvloom.types.spec import EngineSpec

_HALVES: Final = ("bfloat16", "float16")
FP8_CAPABILITY: Final = (8, 9)
_FP8: Final[KVDtype] = "float8_e4m3fn"


class DeviceTarget:
    """Brings weights from the mapped files straight to the device, each once; a rank's slices lie there."""

    def __init__(self, device: GpuDevice, operations: Operations) -> None:
        self._device = device
        self._operations = operations

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
        """Does nothing: weights lie in mapped files until `place` looks at the device's memory."""

    def check_floats(self) -> None:
        if self._capability < FP8_CAPABILITY:
            raise ConfigError(
                f"its weights are floats of 8 bits (FP8), and {self._device.torch} has compute capability "
                f"{'.'.join(map(str, self._capability))}; 8.9 or newer, or weights of 4 or 8 bits that are "
                "integers, are right"
            )

    def check_pooled(self) -> None:
        raise ConfigError("it makes vectors of texts, which CPUs serve; `device: cpu` is right")

    def place(self, module: nn.Module) -> None:
        hold_plainly(module)
        held = (*module.parameters(), *module.buffers(), *quantized_tensors(module))
        tensors = {id(one): one for one in held}
        coming = [one for one in tensors.values() if one.device.type == "cpu"]
        needed = sum(one.numel() * one.itemsize for one in coming)
        free, total = self._device.free()
        if needed > free:
            raise ConfigError(
                f"its weights need {needed:,} bytes, and {free:,} of {total:,} are free on "
                f"{self._device.torch}; a smaller model, a half precision or a larger device is right"
            )
        module.to(self._device.torch)
        move_quantized(module, self._device.torch)

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
    """Has `blocks` × `block_bytes` bytes. It is never resized: peers and recorded graphs hold its address."""

    def __init__(self, blocks: int, block_bytes: int, device: torch.device) -> None:
        """Raises ConfigError with the bytes that are wanted if the device does not have them."""
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


WORKING: Final = 0.1  # of the device's memory, which `kv_memory: auto` leaves to what jobs compute with
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS", "32"  # streams that share one, of 8, wait for each other
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def load_gpu_executor(spec: EngineSpec, progress: Callable[[str], None] = lambda _: None) -> GpuExecutor:
    """Loads a unit of one GPU. Raises ConfigError with what the device lacks."""
    progress(f"opening {spec.device}")
    device, operations = open_gpu(spec.device, cut=cut_green)
    if spec.weave is not None:
        refuse_slices(_open_driver("weave"), device.torch)
    if spec.sleep_dir:
        return load_within_budget(spec, device, operations, _open_driver("memory"), progress)
    return load_executor(spec, device, operations, progress)


def _open_driver(what: str) -> Driver:
    try:
        return Driver()
    except DriverError as error:
        raise ConfigError(f"{what}: {error}; pip install '.[gpu]' in kvloom's checkout is right") from error


def refuse_slices(driver: DriverCalls, device: torch.device) -> None:
    """Raises ConfigError unless MPS runs kernels of several processes on the GPU side by side: by turns of
    the GPU, who waits for another process' attention spins through its own turn, and that in each layer."""
    index = device.index or 0
    try:
        driver.enter(index)
        number = driver("cuDeviceGet", index)
        attribute = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        if int(driver("cuDeviceGetAttribute", attribute, number)):
            return
    except DriverError as error:
        raise ConfigError(f"weave: whether MPS runs on {device} cannot be told: {error}") from error
    raise ConfigError(
        f"weave: two units on {device} without MPS have it by turns, and wait for each other through them; "
        "MPS before the fleet starts (nvidia-cuda-mps-control -d), or no `weave`, is right"
    )


def open_gpu(name: str, cut: Cut, rank: int = 0) -> tuple[GpuDevice, Operations]:
    """Returns the device of a rank of a unit whose first one's is `name`: ranks have GPUs one after the
    other. cut: see `cuda_device`. Raises ConfigError."""
    refuse_expandable(os.environ)
    os.environ.setdefault(*_QUEUES)
    try:
        operations = triton_operations()
    except ImportError as error:
        raise ConfigError(
            f"device: Triton cannot be used here ({error}); pip install '.[gpu]' in kvloom's checkout, "
            "or `device: cpu`, is right"
        ) from error
    return cuda_device(int(name.partition(":")[2] or 0) + rank, cut, operations), operations


def load_executor(
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    progress: Callable[[str], None] = lambda _: None,
) -> GpuExecutor:
    """Loads every model, then takes the pool, then rehearses. Raises ConfigError."""
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
    progress("taking the memory of weights and pool")
    granules.create(count)
    arena = GranuleArena(granules, count, spec.block_bytes)
    models = {name: DeviceModel.place(model, arena, operations) for name, model in loaded.items()}
    executor = GpuExecutor(models, arena, device, GpuWeights(asleep, arena, device))
    rehearse(executor, spec, device, progress)
    return executor


def load_pool(
    spec: EngineSpec,
    device: GpuDevice,
    operations: Operations,
    progress: Callable[[str], None] = lambda _: None,
    team: Team | None = None,
) -> tuple[dict[str, DeviceModel], DeviceArena]:
    """Returns the models, and the memory that they share; in a team this rank's slices, and an equal part of
    the pool, of as many blocks as each rank has. Raises ConfigError, and Unavailable if a rank is gone."""
    device.enter()
    loaded = load_models(spec.models, spec.block_bytes, DeviceTarget(device, operations), progress, team)
    progress("taking the KV arena")
    size = spec.kv_bytes or _rest(device) * spec.tensor_parallel
    blocks = count_blocks(loaded, size, spec.block_bytes, spec.tensor_parallel)
    if team is not None:
        blocks = team.group.least(blocks)
    arena = DeviceArena(blocks, spec.block_bytes, device.torch)
    return {name: DeviceModel.place(model, arena, operations) for name, model in loaded.items()}, arena


def rehearse(
    executor: GpuExecutor,
    spec: EngineSpec,
    device: GpuDevice,
    progress: Callable[[str], None] = lambda _: None,
    agree: Callable[[bool], bool] = bool,
) -> None:
    """Makes the executor ready for jobs; see `GpuExecutor.prepare`. Raises ConfigError if memory is too
    little."""
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


def refuse_expandable(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for expandable segments: peers cannot map what torch allocates in them."""
    for name in _SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ConfigError(
                f"{name}: expandable_segments:True; without it is right, for peers map the KV arena"
            )


def _rest(device: GpuDevice) -> int:
    """Returns the bytes for the pool if the config leaves them open."""
    free, total = device.free()
    rest = free - int(WORKING * total)
    if rest <= 0:
        raise ConfigError(
            f"kv_memory: the weights leave {free:,} of {device.torch}'s {total:,} bytes, too little for "
            "a pool; fewer or smaller models are right"
        )
    return rest
