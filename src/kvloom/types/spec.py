"""What an engine and a router must be told to start."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvloom.types.request import Level

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["adbs", "fcfs", "round-robin", "partitioned"]
Quotas = Literal["adaptive", "fixed"]
Control = Literal["operators", "iterations"]
Splitting = Literal["auto", "none"]
Plane = Literal["shm", "nixl"]
Option = bool | int | float | str | list[str]


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model to serve. `path` is a checkpoint directory or a hub id; `rate` its expected share of the
    requests, against the others' rates; `max_context` bounds what the checkpoint itself allows. Shares are of
    the unit's compute, for a prefill and a decode job that runs beside others; quota: of the pool's blocks,
    to begin with. None leaves them to the policy."""

    name: str
    path: str
    dtype: Dtype = "auto"
    rate: float = 1.0
    max_context: int | None = None
    prefill_share: float | None = None
    decode_share: float | None = None
    quota: float | None = None


class WeaveSpec(Struct, frozen=True):
    """The unit `cold` lends `part` of its pool to this unit's model, and `share` of its sequences are there;
    `auto` is as many as help, while the decode steps of `cold` take at most `bound` longer than alone: 0.15
    is 15 %. control: when `cold` looks for tasks, between its operators or between its iterations. split:
    whether it splits operators, until tasks are expected to hold a step of this unit up by no more than
    `waits` of it."""

    cold: str
    share: float | Literal["auto"]
    part: float
    bound: float = 0.15
    control: Control = "operators"
    split: Splitting = "auto"
    waits: float = 0.05


class EngineSpec(Struct, frozen=True, kw_only=True):
    """One unit: its models, its pool of `kv_bytes`, and how they are scheduled. priorities: the levels of
    execution priority, which the unit's load tells. lease: seconds for which a reservation is kept without
    being renewed. transport: what carries K and V to other units. quotas: whether they move and bend, or are
    walls (no unified pool). overload: of the unit's compute, by which the shares of jobs that run together
    may exceed it. tensor_parallel: ranks, each a process with its heads of all
    models, that share the unit's cores and pool. device: `cpu`, or `cuda:N`, where kv_bytes 0 is what the
    weights leave; of several ranks N is the first one's GPU, and the others have those after it. weave:
    from whom it borrows."""

    models: tuple[ModelSpec, ...]
    kv_bytes: int
    block_bytes: int
    policy: Policy
    max_running: int
    max_waiting: int
    chunk_tokens: int
    threads: int
    unit: str = "unit-0"
    priorities: tuple[Level, ...] = ()
    lease: float = 30.0
    transport: Plane = "shm"
    quotas: Quotas = "adaptive"
    overload: float = 0.0
    tensor_parallel: int = 1
    device: str = "cpu"
    weave: WeaveSpec | None = None


class SchedulerSpec(Struct, frozen=True):
    """The fleet scheduler: its period in seconds, and the freeness in decode steps below which a unit gives
    requests away (out) and above which it takes them (into)."""

    period: float = 0.5
    out: float = 24.0
    into: float = 48.0


class ProgramSpec(Struct, frozen=True):
    """A router program: a shipped one's name or `module:function`, and what it is called with."""

    name: str
    options: dict[str, Option] = {}
