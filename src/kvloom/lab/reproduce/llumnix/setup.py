"""Llumnix's set-up (section 6.1): LLaMA-7B on A10s, one an instance, asked by Poisson or in bursts.

What the paper does not tell is set once, for all of its figures, out of other figures of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kvloom.lab.reproduce.report import Scale
from kvloom.lab.reproduce.setup import Hosted, engine_spec, in_one_layer
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.loading import start_seconds
from kvloom.plan.cost.roofline import Roofline
from kvloom.plan.cost.shapes import find_shape
from kvloom.types.request import Level
from kvloom.types.spec import ModelSpec, Policy

MODEL: Final = "llama-7b"
DEVICE: Final = "A10"
INSTANCES: Final = 16
POOL: Final = 13_616  # tokens an instance (section 6.1)
SIZES: Final[Mapping[Scale, tuple[int, int]]] = {"full": (INSTANCES, 10_000), "small": (4, 60)}
"""The number of instances, and of the requests of a draw. Rates are a fleet's of INSTANCES."""
DRAWS: Final[Mapping[Scale, int]] = {"full": 3, "small": 1}

LINK: Final = 2.5e9  # bytes a second: what figure 10's blocking copies reach over gloo
HOST: Final = 12e-3
"""Seconds of a decode step that the paper's engine takes beside the device: with so many an urgent request of
section 6.4 takes 46 ms a token, as in the paper."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine. `policy` is that of its batching, and `tokens` the most of a prefill job."""

    policy: Policy
    tokens: int


KVLOOM: Final = EngineKind("fcfs", 8192)
PUBLISHED: Final = EngineKind("vllm-2023", 12_800)
"""The paper's engine: vLLM of 2023 with the `max_num_batched_tokens` of the paper's artifact."""

_PAGE: Final = 16  # tokens, as in the paper's engine
_LONGEST: Final = 2 * 6144


def make_units(
    count: int = INSTANCES, levels: tuple[Level, ...] = (), engine: EngineKind = KVLOOM
) -> list[SimulatedUnit]:
    """Returns units of one GPU each. Jobs run one at a time on the whole of it, first come first served.

    `levels` are the levels of execution priority."""
    shape = find_shape(MODEL)
    cost = Hosted(Roofline(find_device(DEVICE), 1, {MODEL: shape}), lambda _: HOST)
    pages = in_one_layer(shape)
    block_bytes = _PAGE * shape.kv_bytes
    models = [ModelSpec(name=MODEL, path="", max_context=_LONGEST)]
    spec = engine_spec(
        "",
        models,
        kv_bytes=POOL // _PAGE * block_bytes,
        block_bytes=block_bytes,
        policy=engine.policy,
        chunk_tokens=engine.tokens,
    )
    spec = structs.replace(spec, priorities=levels)
    return [
        SimulatedUnit(
            structs.replace(spec, unit=f"gpu-{i}"),
            {MODEL: pages},
            1,
            cost,
            bandwidth=LINK,
            start=start_seconds([shape]),
        )
        for i in range(count)
    ]
