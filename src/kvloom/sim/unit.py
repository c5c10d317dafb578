"""A unit of the virtual world: its engine's specification, and devices that are known by their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvloom.core.request import ModelCard
from kvloom.core.spec import EngineSpec
from kvloom.cost.shape import ModelShape
from kvloom.cost.work import CostModel
from kvloom.sim.content import Content
from kvloom.sim.executor import ModelledExecutor
from kvloom.sim.hosting import HostedUnit
from kvloom.sim.links import Link, TimedLink

CONTEXT = 8192  # tokens, of a model whose spec sets none
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}  # by the bytes of a number

PCIE4: Final = 32e9  # bytes a second, one way
LATENCY: Final = 20e-6  # seconds from one unit's memory to another's
STARTING: Final = 4.0  # seconds without weights: the demo fleet's start, by benchmarks.memory_start
LOADING: Final = 1.1e9
"""Bytes of weights a second: the 16 GB of Llama-3-8B from a cloud's disk (AWS gp3) to an A10G took 14.3 s at
best (NVIDIA, Run:ai Model Streamer, 2024)."""


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """One engine to be. shapes: by model of the spec. compute: units that its devices are shared out in.
    bandwidth: of its way out, in bytes a second. overhead: seconds of the engine's own work before a job of
    so many sequences. stride: decode steps that may be one job. start: seconds until one that is started
    while the fleet serves can answer."""

    spec: EngineSpec
    shapes: Mapping[str, ModelShape]
    compute: int
    cost: CostModel
    bandwidth: float = PCIE4
    overhead: Callable[[int], float] | None = None
    stride: int = 4096
    start: float = 0.0


def start_seconds(shapes: Iterable[ModelShape]) -> float:
    """Until a new process that serves these models can answer."""
    return STARTING + sum(shape.weight_bytes for shape in shapes) / LOADING


def timed_link(unit: SimulatedUnit) -> Link:
    return TimedLink(unit.bandwidth, LATENCY)


def modelled_executor(
    unit: SimulatedUnit, content: Content | None = None, host: HostedUnit | None = None
) -> ModelledExecutor:
    """The unit's devices. content: what their pages hold; nothing where it is left out. host: what sees to
    the engine's own work, step by step."""
    spec = unit.spec
    contexts = {model.name: model.max_context or CONTEXT for model in spec.models}
    return ModelledExecutor(
        {name: simulated_card(name, shape, contexts[name]) for name, shape in unit.shapes.items()},
        {name: shape.geometry(spec.block_bytes) for name, shape in unit.shapes.items()},
        blocks=spec.kv_bytes // spec.block_bytes,
        compute=unit.compute,
        cost=unit.cost,
        content=content,
        overhead=None if host else unit.overhead,
        stride=1 if host else unit.stride,
        host=host,
    )


def simulated_card(name: str, shape: ModelShape, context: int) -> ModelCard:
    """The card of a model of which only the shape is known."""
    return ModelCard(
        name=name,
        path="",
        context_length=context,
        vocab_size=shape.vocab,
        tokenizer="{}",
        chat_template=None,
        special_tokens={},
        eos_token_ids=(),
        bos_token_id=None,
        add_bos=False,
        architecture="",
        parameters=shape.parameters,
        dtype=DTYPES[shape.itemsize],
    )
