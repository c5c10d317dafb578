"""Predicts how long a job takes by what it must compute, read and send (Williams, Waterman and Patterson,
2009)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot

from msgspec import Struct

from kvloom.plan.cost.devices import FITTED, Constants, DeviceSpec
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import Operator, Work, WorkPace, layer_parts, operators_of
from kvloom.types.errors import ConfigError
from kvloom.types.job import Phase


@dataclass(frozen=True, slots=True)
class _Costs:
    """A model's costs on the whole unit, in seconds. `token`, `drawn` and `pair` are the costs of computing;
    `weights` is that of reading the weights that every step needs, and `expert` that of an expert of every
    layer; `kv` and `passing` are those of a token's K and V, and of what passes between its kernels; `moving`
    is that of a token's all-reduces, and `fixed` that of a step; `decode` and `prefill` are those of issuing
    one. `experts` is the number of a layer's experts, 0 if it has but one, and `missed` the probability that
    a token passes by one of them."""

    token: float
    drawn: float
    pair: float
    weights: float
    expert: float
    kv: float
    passing: float
    moving: float
    fixed: float
    decode: float
    prefill: float
    experts: int
    missed: float


class _Parts(Struct, frozen=True, gc=False):
    """A job's seconds on the whole unit. `products` and `attention` are spent computing, `weights` and
    `traffic` reading and writing; `rest` is as long on any share."""

    products: float
    attention: float
    weights: float
    traffic: float
    rest: float
    host: float

    def seconds(self, compute: float, memory: float) -> float:
        """Returns the seconds of the job. `compute` and `memory` tell how many times as long as on the whole
        unit computing and reading take."""
        # the host issues ahead of the device: the slower one counts, and only near a tie both
        return float((self.device(compute, memory) ** 8 + self.host**8) ** 0.125)

    def device(self, compute: float, memory: float) -> float:
        """Returns the seconds for which the device is busy."""
        products = hypot(compute * self.products, memory * self.weights)
        return products + compute * self.attention + memory * self.traffic + self.rest

    def demand(self, compute: float, memory: float) -> tuple[float, float]:
        """Returns the parts of the unit's computing and bandwidth that the work uses, slowed so much."""
        seconds = self.seconds(compute, memory)
        return (self.products + self.attention) / seconds, (self.weights + self.traffic) / seconds


class Roofline:
    """Satisfies `OperatorCostModel`: `gpus` devices of one node share every layer (tensor parallelism).

    Products overlap with the reading of their weights, so a step takes √(compute² + reading²) for them,
    between the larger of the two and their sum; attention, the traffic between kernels and two all-reduces a
    layer are added. All of it depends on the share but for all-reduces and starts of kernels.

    Jobs that run beside each other compete: if together they would compute or read more than the unit can,
    that part of each takes as many times longer, and if their shares are more than the whole, each has its
    part of it.
    """

    def __init__(
        self, device: DeviceSpec, gpus: int, shapes: Mapping[str, ModelShape], constants: Constants = FITTED
    ) -> None:
        self._full, self._ease, self._sequence = constants.full, constants.ease, constants.sequence
        self._costs = {name: _costs(shape, device, gpus, constants) for name, shape in shapes.items()}
        self._shapes = shapes
        self._constants = constants
        self._memory = constants.bandwidth * device.bandwidth * gpus
        self._compute = constants.compute * device.flops * gpus
        layer = max(shapes.values(), key=lambda shape: shape.layers)
        self.start = constants.kernels / len(list(layer_parts(layer, 1.0)))
        self.poll = constants.poll

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        own = self._parts(work)
        if not beside:
            return own.seconds(*self._slower(work.share))
        crowd = max(1.0, work.share + sum(other.share for other in beside))
        slower = self._slower(work.share / crowd)
        compute, memory = own.demand(*slower)
        for other in beside:
            more_compute, more_memory = self._parts(other).demand(*self._slower(other.share / crowd))
            compute, memory = compute + more_compute, memory + more_memory
        return own.seconds(slower[0] * max(1.0, compute), slower[1] * max(1.0, memory))

    def shape(self, model: str) -> ModelShape:
        return self._shapes[model]

    def operators(self, work: Work) -> tuple[Operator, ...]:
        """Returns the operators, whose times add up to `device` above, but for all-reduces, between which
        nothing is looked for."""
        shape, costs, parts = self._shapes[work.model], self._costs[work.model], self._parts(work)
        compute, memory = self._slower(work.share)
        attention = compute * parts.attention + memory * (parts.traffic - work.tokens * costs.passing)
        return operators_of(
            shape,
            tokens=work.tokens,
            drawn=work.drawn,
            touched=shape.experts * (1.0 - costs.missed**work.tokens) if costs.experts else 1.0,
            attention=attention / shape.layers,
            start=self.start,
            pace=WorkPace(compute * shape.itemsize / self._compute, memory / self._memory),
        )

    def queued(self, work: Work) -> float:
        parts = self._parts(work)
        return max(0.0, parts.device(*self._slower(work.share)) - parts.host)

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        pair = 2 * self._constants.attention * shape.heads * shape.head_dim * shape.itemsize / self._compute
        held = context + rows * (1 + self._sequence)
        return self.start + (context + rows) * pair + held * shape.kv_bytes / self._memory / shape.layers

    def _slower(self, share: float) -> tuple[float, float]:
        """Returns how many times longer computing and reading take on a share."""
        return max(1.0, self._full / share), (share + self._ease) / (share * (1.0 + self._ease))

    def _parts(self, work: Work) -> _Parts:
        costs = self._costs.get(work.model)
        if costs is None:
            raise ConfigError(f"no cost is known of model {work.model!r}; {', '.join(self._costs)} are known")
        tokens, decode = work.tokens, work.phase is Phase.DECODE
        weights: float = costs.weights
        if costs.experts:
            weights += costs.expert * costs.experts * (1.0 - costs.missed**tokens)
        held: float = work.context + tokens
        held += (work.batch if decode else work.rows) * self._sequence
        return _Parts(
            products=tokens * costs.token + work.drawn * costs.drawn,
            attention=work.pairs * costs.pair,
            weights=weights,
            traffic=held * costs.kv + tokens * costs.passing,
            rest=costs.fixed + tokens * costs.moving,
            host=costs.decode if decode else costs.prefill,
        )


def _costs(shape: ModelShape, device: DeviceSpec, gpus: int, constants: Constants) -> _Costs:
    size, layers, hidden = shape.itemsize, shape.layers, shape.hidden
    compute = constants.compute * device.flops * gpus * 2 / size  # half as many of twice the width
    memory = constants.bandwidth * device.bandwidth * gpus
    # Numbers a token that pass through memory between a layer's kernels: two norms (4 hidden), two residual
    # sums (6) and two products' inputs and outputs (4) on every device; in parts q, k, v, rotary,
    # attention (about 8 hidden) and the MLP's inside (2 ffn for each of its matrices).
    each = 14 * hidden
    parted = 8 * hidden + 2 * shape.ffn * shape.active * (3 if shape.gated else 2)
    always = layers * shape.attention_parameters + shape.vocab * hidden
    mlp = layers * shape.expert_parameters
    mixed = shape.experts > 1
    kv = shape.kv_bytes * -(-shape.kv_heads // gpus) * gpus / shape.kv_heads  # of each device a whole head
    reduced = 2 * layers * hidden * size * 2 * (gpus - 1) / gpus  # two all-reduces a layer, as a ring
    host = layers * constants.host * (constants.host_parallel if gpus > 1 else 1.0)
    return _Costs(
        token=2 * (layers * shape.attention_parameters + mlp * shape.active) / compute,
        drawn=2 * shape.vocab * hidden / compute,
        pair=constants.attention * 4 * layers * shape.heads * shape.head_dim / compute,
        weights=(always + (0 if mixed else mlp)) * size / memory,
        expert=mlp * size / memory if mixed else 0.0,
        kv=kv / memory,
        passing=layers * (each * gpus + parted) * size / memory,
        moving=reduced / (constants.link * device.link),
        fixed=layers * (constants.kernels + (2 * constants.hop if gpus > 1 else 0.0)),
        decode=host,
        prefill=host * constants.host_prefill,
        experts=shape.experts if mixed else 0,
        missed=1.0 - shape.active / shape.experts,
    )
