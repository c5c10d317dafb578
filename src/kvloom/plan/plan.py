"""A plan: units, the models on each, and what is expected of them. `serve` and `simulate` both take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvloom.plan.cluster import CPU, Demand, MeshKind
from kvloom.plan.cost.shapes import ModelShape, read_shape
from kvloom.plan.growth import MAX_BATCH
from kvloom.types.errors import ConfigError
from kvloom.types.spec import (
    GPU_CHUNK_TOKENS,
    RESERVE,
    Dtype,
    ModelSpec,
    Slo,
    UnitAbilities,
    shared_bytes,
    unit_abilities,
)

PLAN_VERSION = 2
LEAST_RATE: Final = 1e-6  # a model that nobody asks for is served all the same

_Share = Annotated[float, Meta(gt=0.0, le=1.0)]
_Rate = Annotated[float, Meta(ge=0.0)]
_Name = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00-\x1f]+$")]
_Node = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*$")]


class PlannedModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a unit. Shares are of the unit's compute."""

    name: _Name
    path: str | None
    """The model's checkpoint, if it has one."""
    shape: ModelShape
    rate: _Rate
    """The requests a second that come to it here."""
    prompt: _Rate
    """The mean number of tokens of a prompt."""
    output: _Rate
    """The mean number of tokens of an output."""
    prefill_share: _Share
    decode_share: _Share
    quota: _Share
    """The model's share of the unit's KV blocks."""
    throughput: _Rate
    """The requests a second that it could answer, if so many came."""
    awake: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """The part of the time in which its weights are expected to be in memory; the other requests are cold."""
    cold_wait: _Rate = 0.0
    """The mean seconds for which a cold request is expected to wait for them."""
    slo: Slo | None = None
    """The model's objective; None for that of the config, or the usual one."""
    speculation: str | None = None
    """The drafter of tokens, as in a config; None for the config's own."""
    acceptance: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """The probability that a drafted token is taken to be right if those before it are."""

    def share_of(self, known: ModelSpec) -> ModelSpec:
        """Returns a model as this unit is to serve it, and else as it is known."""
        return replace(
            known,
            rate=max(self.rate, LEAST_RATE),
            prefill_share=self.prefill_share,
            decode_share=self.decode_share,
            quota=self.quota,
            slo=self.slo or known.slo,
            speculation=self.speculation or known.speculation,
            acceptance=self.acceptance or known.acceptance,
        )


class PlannedUnit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A unit: `gpus` devices of kind `device` on one node that work as one. A CPU's are its cores."""

    name: _Name
    node: _Node
    """The name of the machine; empty if any will do."""
    device: str
    gpus: Annotated[int, Meta(ge=1, le=4096)]
    index: Annotated[int, Meta(ge=0, le=4095)] = 0
    """The number of the first GPU on its node; those after it are the others. 0 for cores."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=4096)] = 1
    """The number of ranks: one for each GPU. Cores need but one."""
    kv_bytes: Annotated[int, Meta(ge=1, le=2**42)]
    """The bytes of its pool, over all devices."""
    memory: Annotated[int, Meta(ge=0, le=2**42)] = 0
    """The bytes that pool and weights have together, if weights sleep; the plan counts on `kv_bytes` of them
    for the pool then. It is 0 if all weights stay."""
    models: tuple[PlannedModel, ...]

    @property
    def place(self) -> str:
        """Returns the device as an engine knows it: `cpu`, or `cuda:N`, its first GPU."""
        return CPU if self.device == CPU else f"cuda:{self.index}"

    @property
    def abilities(self) -> UnitAbilities:
        return unit_abilities(self.device, self.tensor_parallel)

    def check(self) -> None:
        """Raises ConfigError if a unit of its kind cannot do what it is to do."""
        ranks = self.tensor_parallel
        if self.device == CPU and ranks > self.gpus:
            raise ConfigError(f"{self.name}: {ranks} ranks for {self.gpus} cores; a core for each is right")
        if self.device == CPU and self.index:
            raise ConfigError(f"{self.name}: index {self.index}; cores have no number, so 0 is right")
        if self.device != CPU and ranks != self.gpus:
            raise ConfigError(
                f"{self.name}: tensor_parallel {ranks} for {self.gpus} × {self.device}; {self.gpus} is right"
            )
        for model in self.models:
            if model.shape.kv_heads % ranks:
                raise ConfigError(
                    f"{self.name}: {ranks} ranks cannot share the {model.shape.kv_heads} KV heads of "
                    f"{model.name} evenly"
                )
            if not self.abilities.shares and min(model.prefill_share, model.decode_share) < 1.0:
                raise ConfigError(
                    f"{self.name}: shares of the compute for {model.name}; jobs of {ranks} GPUs take turns, "
                    "so 1 is right"
                )

    def check_sleep(self) -> None:
        """Raises ConfigError if weights are to sleep on a unit of a kind whose weights cannot."""
        if self.memory and not self.abilities.sleeps:
            raise ConfigError(
                f"{self.name}: memory is set, and weights sleep on units of one rank on {CPU}, not on "
                f"{self.gpus} × {self.device}; `kvloom simulate` alone takes such a plan"
            )

    def check_pool(self, block_bytes: int) -> None:
        """Raises ConfigError if the pool, in blocks of so many bytes, holds no page of a model, or the memory
        that it has together with weights not the largest of those beside a page."""
        for model in self.models:
            page = model.shape.geometry(block_bytes).blocks_per_page * block_bytes
            whole = page + -(-model.shape.weight_bytes // block_bytes) * block_bytes
            if self.memory and whole > shared_bytes(self.memory):
                raise ConfigError(
                    f"{self.name}: memory {self.memory:,} does not hold {model.name} and a page of its K and "
                    f"V; at least {whole * RESERVE // (RESERVE - 1) + 1:,} are right"
                )
            if page > self.kv_bytes and not self.memory:
                raise ConfigError(
                    f"{self.name}: kv_bytes {self.kv_bytes:,} hold no page of {model.name}; "
                    f"at least {page:,} are right"
                )


class PlacementPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan: the units, and what they are expected to answer."""

    version: int = PLAN_VERSION
    units: tuple[PlannedUnit, ...]
    throughput: float
    """The sum of what each model is expected to answer, at most its rate."""
    made_by: str
    """The way in which the plan was made, in one line."""


class _Head(Struct):
    """The keys that tell a plan from other JSON."""

    version: int
    made_by: str
    units: msgspec.Raw


def is_plan(file: Path) -> bool:
    """Returns whether the file looks like a plan, of any version and however wrong otherwise."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        msgspec.json.decode(file.read_bytes(), type=_Head)
        return True
    return False


def read_plan(file: Path, right: str = "the path of a plan") -> PlacementPlan:
    """Returns the plan in `file`. right: what there could be instead of no file. Raises ConfigError, which
    says what is wrong and where it stands."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; {right} is right") from error
    try:
        version = msgspec.json.decode(text, type=_Head).version
        if version != PLAN_VERSION:
            raise ConfigError(
                f"{file}: a plan of version {version}; this kvloom reads version {PLAN_VERSION}, which its "
                "own `kvloom plan` writes"
            )
        plan = msgspec.json.decode(text, type=PlacementPlan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no plan ({error}); what `kvloom plan -o` writes is right") from error
    names = [unit.name for unit in plan.units]
    if not names or len(set(names)) < len(names) or any(not unit.models for unit in plan.units):
        raise ConfigError(f"{file}: units with names of their own, and with models, are right")
    for unit in plan.units:
        models = [model.name for model in unit.models]
        if len(set(models)) < len(models):
            raise ConfigError(f"{file}: {unit.name} has two models of one name ({', '.join(models)})")
    try:
        _check_units(plan.units)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    return plan


def _check_units(units: Iterable[PlannedUnit]) -> None:
    """Raises ConfigError if a unit cannot be, or two of them have the same GPU."""
    taken: dict[tuple[str, int], str] = {}
    for unit in units:
        unit.check()
        for number in range(unit.index, unit.index + unit.gpus) if unit.device != CPU else ():
            other = taken.setdefault((unit.node, number), unit.name)
            if other != unit.name:
                where = f" of {unit.node}" if unit.node else ""
                raise ConfigError(
                    f"{unit.name}: cuda:{number}{where} is {other}'s too; GPUs of its own are right"
                )


def write_plan(file: Path, plan: PlacementPlan) -> None:
    """Writes the plan. Raises ConfigError if it cannot be written."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a path that can be written is right") from error


USABLE: Final = 0.95  # of a device's memory; the driver, the runtime and the allocator's gaps take the rest
_LOGIT_BYTES: Final = 4


def usable_bytes(kind: MeshKind) -> int:
    """Returns what models and pool may take of a mesh's memory. On cores the unit's process is there too, but
    for a budget, which it is beside."""
    if kind.budget:
        return shared_bytes(kind.gpus * kind.budget)
    process = PROCESS_BYTES if kind.device == CPU else 0
    return int(USABLE * kind.memory) * kind.gpus - process


def fixed_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """Returns the bytes of the weights, and of the activations of the model's largest jobs, over all of the
    mesh's devices. A budget's reserve is for activations."""
    return shape.weight_bytes + (0 if kind.budget else activation_bytes(shape, kind))


PROCESS_BYTES: Final = 512 << 20  # of an engine's process without models: torch, numba's code, Python
FLEET_BYTES: Final = 512 << 20
"""The bytes of a host's memory for a fleet's processes that are no unit's: supervisor, gateway, fork server,
scheduler and sandboxes of texts. With two of the demo's models they had 390 MiB (PSS), without a
scheduler."""
CPU_ITEMSIZE: Final = 4  # kvloom computes in float32 on a CPU, if nobody names another format


def host_bytes(shape: ModelShape) -> int:
    """Returns the bytes of a host's memory that a model takes besides the pool of a unit on cores."""
    return fixed_bytes(shape, MeshKind(CPU, 0, 1, unit_abilities(CPU, 1)))


def checkpoint_bytes(checkpoint: str, dtype: Dtype = "auto") -> int:
    """Returns `host_bytes` of the model in a checkpoint's folder, or the size of its files if no shape can
    say it, or that of a GGUF file; 0 if it is nothing here, but a hub id. `dtype` is the format in which it
    is served."""
    folder = Path(checkpoint)
    if folder.is_file():
        return folder.stat().st_size
    itemsize = CPU_ITEMSIZE if dtype in ("auto", "float32") else 2
    try:
        return host_bytes(read_shape(folder, itemsize)) if folder.is_dir() else 0
    except ConfigError:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def activation_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """Returns the bytes of activations. The residual stream and its norm are on every device, and the heads
    and the MLP are split."""
    copies = 1 if kind.device == CPU else kind.gpus
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    mlp = shape.ffn * (2 if shape.gated else 1)
    numbers = GPU_CHUNK_TOKENS * (2 * shape.hidden * copies + attention + mlp)
    return numbers * shape.itemsize + MAX_BATCH * shape.vocab * _LOGIT_BYTES


def token_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """Returns the bytes of K and V of a token over all devices. If there are more devices than KV heads,
    several keep the same one."""
    if kind.device == CPU:
        return shape.kv_bytes
    held = kind.gpus * -(-shape.kv_heads // kind.gpus)
    return shape.kv_bytes // shape.kv_heads * held


def request_bytes(demand: Demand, kind: MeshKind) -> int:
    """Returns the bytes of K and V of a whole request of mean length."""
    return int((demand.prompt + demand.output) * token_bytes(demand.shape, kind)) + 1


def pool_bytes(kind: MeshKind, shapes: Iterable[ModelShape]) -> int:
    """Returns the bytes that these models leave for the KV pool; below 0 if they do not fit. If weights
    sleep, the largest of them at least has to be in memory."""
    fixed = [fixed_bytes(shape, kind) for shape in shapes]
    return usable_bytes(kind) - (max(fixed) if kind.budget else sum(fixed))


_LEAST: Final = 1e-3  # a model that nobody asks for today may be asked tomorrow


def quotas(kind: MeshKind, demands: Sequence[Demand], rates: Sequence[float]) -> list[float]:
    """Returns shares of the pool in proportion to rate × KV bytes of a token; they sum to 1. `rates` are the
    requests that come to each model here."""
    weights = [rate * token_bytes(demand.shape, kind) for demand, rate in zip(demands, rates, strict=True)]
    whole = sum(weights)
    shares = [weight / whole if whole else 1.0 / len(weights) for weight in weights]
    shares = [max(share, _LEAST) for share in shares]
    return [share / sum(shares) for share in shares]
