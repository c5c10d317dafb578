"""What fits into a mesh, in bytes: weights, activations, and the KV pool that is left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvloom.cost.shape import ModelShape
from kvloom.plan.cluster import CPU, MeshKind
from kvloom.plan.demand import Demand
from kvloom.plan.growth import MAX_BATCH

USABLE: Final = 0.95  # of a device's memory; the driver, the runtime and the allocator's gaps take the rest
CHUNK_TOKENS: Final = 2048  # of a prefill job; MuxServe's most
_LOGIT_BYTES: Final = 4


def usable_bytes(kind: MeshKind) -> int:
    return int(USABLE * kind.memory) * kind.gpus


def fixed_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """Weights and the activations of the model's largest jobs, over all of the mesh's devices."""
    return shape.weight_bytes + activation_bytes(shape, kind)


def activation_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """The residual stream and its norm are on every device, what heads and MLP compute is split."""
    copies = 1 if kind.device == CPU else kind.gpus
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    mlp = shape.ffn * (2 if shape.gated else 1)
    numbers = CHUNK_TOKENS * (2 * shape.hidden * copies + attention + mlp)
    return numbers * shape.itemsize + MAX_BATCH * shape.vocab * _LOGIT_BYTES


def token_bytes(shape: ModelShape, kind: MeshKind) -> int:
    """K and V of a token over all devices. Where there are more devices than KV heads, several keep the same
    one."""
    if kind.device == CPU:
        return shape.kv_bytes
    held = kind.gpus * -(-shape.kv_heads // kind.gpus)
    return shape.kv_bytes // shape.kv_heads * held


def request_bytes(demand: Demand, kind: MeshKind) -> int:
    """K and V of a request of mean length, whole."""
    return int((demand.prompt + demand.output) * token_bytes(demand.shape, kind)) + 1


def pool_bytes(kind: MeshKind, shapes: Iterable[ModelShape]) -> int:
    """What these models leave for the KV pool; below 0 where they do not fit."""
    return usable_bytes(kind) - sum(fixed_bytes(shape, kind) for shape in shapes)
