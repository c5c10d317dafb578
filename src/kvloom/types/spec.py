"""The specifications that engines, the fleet scheduler and the router start from."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvloom.types.geometry import KVDtype
from kvloom.types.request import Level

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["adbs", "fcfs", "round-robin", "partitioned", "slack", "vllm-2023", "adbs-2024"]
DEFAULT_POLICY: Final[Policy] = "slack"
"""The policy that has most requests in time over the workloads of `kvloom reproduce muxserve --figure
policies`."""
Quotas = Literal["adaptive", "fixed", "sequences", "fixed-sequences"]
"""The kinds of a unit's quotas. They move and bend; or they are walls (no unified pool), beyond which a model
runs one sequence at most; or they bound how many sequences of a model run, as those of MuxServe's published
code do, and move or not."""
Control = Literal["operators", "iterations"]
Splitting = Literal["auto", "none"]
TransportName = Literal["auto", "shm", "nixl", "tcp"]
BY_NAME: Final = ("none", "ngram")
"""The values of `speculation` besides a model's name: nothing is drafted, or the n-grams of a sequence's own
text are."""
MOST_DRAFTED: Final = 15
"""Tokens that are drafted for a sequence in a step."""
MOST_ROWS: Final = 64
"""The rows of a step with drafts, or of a step of the model that drafts."""
Option = bool | int | float | str | list[str]


RESERVE: Final = 20
"""One part in so many of a budget for weights and pool stays free for what jobs need while they run."""


def shared_bytes(memory: int) -> int:
    """Returns what weights and pool have of a budget for both."""
    return memory - memory // RESERVE


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """A model's service-level objective, in seconds: a request's first token is due `ttft` after it came, and
    its token number i, counted from 0, `i * tpot` after the first."""

    ttft: Annotated[float, Meta(gt=0.0)] = 2.0
    tpot: Annotated[float, Meta(gt=0.0)] = 0.2


class AdapterSpec(Struct, frozen=True):
    """A LoRA adapter, which is served as a model of its own name beside its base."""

    name: str
    path: str  # the folder that PEFT has saved


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model to serve. None leaves a share or a quota to the policy."""

    name: str
    path: str  # a checkpoint's folder, or a hub id
    revision: str | None = None  # of the hub id: a commit, a tag or a branch; None is the main branch
    sha256: str | None = None  # the digest that the weights must have, as `kvloom model digest` prints it
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"  # of K and V in the pool
    rate: float = 1.0  # expected share of the requests, against the other models' rates
    max_context: int | None = None  # a bound below the checkpoint's own
    prefill_share: float | None = None  # of the unit's compute, for a prefill job that runs beside others
    decode_share: float | None = None
    quota: float | None = None  # of the pool's blocks, to begin with
    memory: int = 0  # bytes of the host's memory that it takes besides the pool, as far as that is known
    speculation: str = "none"  # what drafts tokens: `BY_NAME`, or the name of a smaller model of the unit
    acceptance: float = 0.0  # the probability that a drafted token is right, for plans and simulations
    slo: Slo = Slo()  # by which the policy `slack` chooses
    adapters: tuple[AdapterSpec, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which it is served: its own, and those of its adapters."""
        return self.name, *(adapter.name for adapter in self.adapters)

    @property
    def draft(self) -> str | None:
        """The model that drafts tokens for this one; None if none does."""
        return None if self.speculation in BY_NAME else self.speculation


class WeaveSpec(Struct, frozen=True):
    """A loan of the unit `cold`, or of the freest of it and `others`, to this unit's model (Weaver, section
    4)."""

    cold: str
    share: float | Literal["auto"]  # of the model's sequences that are offloaded; auto: as many as help
    part: float  # of the pool of `cold` that is lent
    bound: float = 0.15  # decode steps of `cold` may take longer by this part than alone, under `auto`
    control: Control = "operators"  # when `cold` looks for tasks: between operators or between iterations
    split: Splitting = "auto"  # whether `cold` splits its operators
    waits: float = 0.05  # part of a step of this unit by which tasks are expected to hold it up, at most
    others: tuple[str, ...] = ()  # further units that may lend instead
    gpus: tuple[str, ...] = ()  # those of all units that may lend, in their order; none of CPU units

    @property
    def colds(self) -> tuple[str, ...]:
        """Returns all units that may lend."""
        return (self.cold, *self.others)


class UnitAbilities(Struct, frozen=True, cache_hash=True):
    """Says what a unit of one kind can do. Planner, config, engine and simulator ask this record, and have no
    rule of their own."""

    moves: bool
    """K and V are sent and received, so that its requests move and programs may split them over units."""
    shares: bool
    """Jobs run side by side, each on a share of the compute. Without it they take turns, and each has all."""
    weaves: bool
    """It lends blocks and attention to other units, and borrows theirs."""
    sleeps: bool
    """Its models' weights can sleep, and share one budget with its pool."""
    adapts: bool
    """It serves adapters beside their base."""
    mixes: bool
    """A prompt's chunk and a model's decode step may be one job. GPUs would run it as a prefill, which is not
    recorded; nobody has measured whether that pays."""
    kv_dtypes: tuple[KVDtype, ...]
    """The number formats that it can keep K and V in. On GPUs a model's must be the one it computes in, or
    FP8."""
    keeps: bool = False
    """Its cached prefixes go to files when they give way. Nobody has tried that on GPUs."""
    speculates: bool = False
    """Its decode steps verify drafted tokens. Nobody has tried that on GPUs."""


def unit_abilities(device: str, ranks: int, transport: TransportName = "shm") -> UnitAbilities:
    """Returns what a unit of so many ranks can do. `device` is `cpu`; anything else is a GPU.

    The ranks of a CPU have one arena together and a channel for each job that runs at the same time. Those of
    GPUs have one lane, and as many arenas, which no transport joins. Loans are memory that both units map, so
    they need the transport of one host, and a lender's ranks would have to attend together."""
    alone = ranks == 1
    together = alone or device == "cpu"
    return UnitAbilities(
        moves=together,
        shares=together,
        weaves=alone and transport == "shm",
        sleeps=alone and device == "cpu",
        adapts=alone and device == "cpu",
        mixes=device == "cpu",
        kv_dtypes=("auto", "float32", "bfloat16", "int8") if device == "cpu" else _ON_GPUS,
        keeps=device == "cpu",
        speculates=device == "cpu",
    )


def gpu_index(device: str) -> int:
    """Returns the number of a GPU by its name: 1 for `cuda:1`, 0 for `cuda`."""
    return int(device.partition(":")[2] or 0)


CHUNK_TOKENS: Final = 512
"""Prompt tokens of a prefill job on cores, unless the config says otherwise."""
GPU_CHUNK_TOKENS: Final = 2048
"""The same on a GPU, which is idle in part with fewer. It is MuxServe's maximum, too."""


def default_chunk(device: str) -> int:
    """Returns the prompt tokens that a prefill job takes at most by default. `device` is as in
    `unit_abilities`."""
    return CHUNK_TOKENS if device == "cpu" else GPU_CHUNK_TOKENS


VECTOR_TOKENS: Final = 2048
"""Tokens of texts that a job takes by default if no model of the unit generates: there are no streams that it
could hold up, and it computes more at once."""

_ON_GPUS: Final[tuple[KVDtype, ...]] = ("auto", "float32", "bfloat16", "float8_e4m3fn")


class EngineSpec(Struct, frozen=True, kw_only=True):
    """One unit: its models, its pool, and how they are scheduled."""

    models: tuple[ModelSpec, ...]
    kv_bytes: int  # of the pool, or of pool and weights if those can sleep; 0 on a GPU: what weights leave
    block_bytes: int
    policy: Policy
    max_running: int
    max_waiting: int
    chunk_tokens: int
    threads: int
    vector_tokens: int | None = None
    """The tokens of texts that a job takes at most if no model of the unit generates; None stands for
    `chunk_tokens`."""
    unit: str = "unit-0"
    priorities: tuple[Level, ...] = ()  # levels of execution priority, which the unit's load tells
    lease: float = 30.0  # seconds for which a reservation is kept without being renewed
    transport: TransportName = "shm"  # what carries K and V to other units
    transport_host: str = "127.0.0.1"  # the host's address at which units of the transport tcp listen
    quotas: Quotas = "adaptive"
    overload: float = 0.0  # part of the compute by which shares of jobs that run together may exceed it
    tensor_parallel: int = 1  # ranks, each a process with its heads of all models
    device: str = "cpu"  # or `cuda:N`; of several ranks N is the first one's GPU, and the others follow it
    weave: WeaveSpec | None = None  # the loan that this unit asks for
    memory: int = 0  # bytes of the host's memory that its processes take besides models and pool
    sleep_dir: str = ""  # the folder in which weights lie while they sleep; empty: they stay in memory
    cache_dir: str | None = None  # the folder for cached prefixes that give way
    cache_size: int = 0  # bytes of all files there

    @property
    def served(self) -> frozenset[str]:
        """The names of all models that the unit serves, adapters included."""
        return frozenset(name for model in self.models for name in model.names)

    @property
    def abilities(self) -> UnitAbilities:
        """Returns what the unit can do, by its kind."""
        return unit_abilities(self.device, self.tensor_parallel, self.transport)

    @property
    def drafting(self) -> bool:
        """Tells whether a model of the unit drafts for another one."""
        return any(model.draft is not None for model in self.models)

    @property
    def draft_problem(self) -> str | None:
        """Says which model lacks the one that is to draft for it, and what would be right; None if none
        does."""
        names = [model.name for model in self.models]
        for model in self.models:
            if model.draft is not None and (model.draft not in names or model.draft == model.name):
                others = ", ".join(name for name in names if name != model.name) or "no other model"
                return (
                    f"models.{model.name}.speculation: {model.draft!r} is to draft for it, and the unit has "
                    f"{others}; {', '.join(BY_NAME)} or another model of the same unit is right"
                )
        return None


class SchedulerSpec(Struct, frozen=True):
    """The settings by which the fleet scheduler moves requests (Llumnix, section 4.4.3)."""

    period: float = 0.5  # seconds
    out: float = 24.0  # freeness, in decode steps, below which a unit gives requests away
    into: float = 48.0  # freeness above which a unit takes requests


class ProgramSpec(Struct, frozen=True):
    """A router program: the name of a shipped one or `module:function`, and its options."""

    name: str
    options: dict[str, Option] = {}
