"""The keys of a workload file: what a workload is made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from kvloom.lab.workload.arrivals import Gaps, constant, gamma, in_pieces, poisson
from kvloom.lab.workload.lengths import STAND_INS, Tokens, Uniform
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import F64, I64, AnyArray

VOCAB: Final = 256
LONGEST: Final = 1 << 24  # tokens of one prompt or answer
DAY: Final = 86400.0
STEPS: Final = 288  # of a drift's period; every five minutes of a day
_AT_ONCE: Final = 1024
_TRIES: Final = 200  # draws of a chunk before its limits count as impossible
_OF_A_TRACE: Final = ("rate", "top_rate", "drift", "arrivals", "lengths", "system", "conversation")


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _on_one_line(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{_shown(name)}; a name of printable characters is right")
    return name


def _process(value: Any) -> Gaps:
    """Reads `poisson`, `constant`, or {cv: 4}, which is Gamma with that coefficient of variation."""
    match value:
        case "poisson":
            return poisson
        case "constant":
            return constant
        case {"cv": int() | float() as cv} if len(value) == 1 and 0.01 <= cv <= 100 and cv is not True:
            return gamma(cv)
    raise ValueError(f"{_shown(value)}; poisson, constant, or {{cv: C}} with C from 0.01 to 100 is right")


def _side(value: Any, info: ValidationInfo) -> Tokens:
    """Reads a number of tokens, [least, most], or the name of a stand-in."""
    if isinstance(value, str) and value in STAND_INS:
        tokens: Tokens = getattr(STAND_INS[value], str(info.field_name))
        return tokens
    ends = value if isinstance(value, list) else [value, value]
    whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if not whole or len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= LONGEST:
        known = ", ".join(STAND_INS)
        raise ValueError(f"{_shown(value)}; a number of tokens, [least, most], or one of {known} is right")
    return Uniform(*ends)


def _both_sides(value: Any) -> Any:
    return {"prompt": value, "output": value} if isinstance(value, str) else value


def _whole_keys(value: Any) -> Any:
    """Returns the mapping with whole numbers for keys, which are texts in JSON."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) else key: share for key, share in value.items()}


def _some_share(value: dict[int, float]) -> dict[int, float]:
    if not sum(value.values()) > 0:
        raise ValueError(f"{_shown(value)}; {{priority: share}}, as `{{-1: 0.1, 0: 0.9}}`, is right")
    return value


def _named(value: Any) -> Any:
    """Reads a list of names as a mapping without settings."""
    if isinstance(value, list):
        if not all(isinstance(name, str) and name for name in value) or len(set(value)) != len(value):
            raise ValueError(f"{_shown(value)}; a list of names, each once, is right")
        return {name: {} for name in value}
    return {name: each or {} for name, each in value.items()} if isinstance(value, dict) else value


Name = Annotated[str, Field(max_length=200), AfterValidator(_on_one_line)]
Rate = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TokenCount = Annotated[int, Field(ge=1, le=LONGEST)]
Process = Annotated[Gaps, PlainValidator(_process)]
Side = Annotated[Tokens, PlainValidator(_side)]
Priorities = Annotated[
    dict[int, Share], BeforeValidator(_whole_keys), Field(min_length=1), AfterValidator(_some_share)
]
_Scale = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Lengths(Section):
    """Prompts and answers, drawn independently. A pair that is longer than a limit is drawn anew, as MuxServe
    drops it."""

    prompt: Side
    output: Side
    max_prompt: TokenCount | None = None
    max_total: TokenCount | None = None

    def draw(self, rng: np.random.Generator, count: int) -> I64:
        """Returns [count, 2] tokens. Raises ConfigError if (nearly) nothing fits the limits."""
        kept: list[I64] = []
        left = count
        for _ in range(_TRIES):
            pairs = np.stack((self.prompt.draw(rng, count), self.output.draw(rng, count)), axis=1)
            kept.append(pairs[self._fits(pairs)][:left])
            left -= len(kept[-1])
            if left == 0:
                return np.concatenate(kept)
        raise ConfigError("lengths: hardly a request fits max_prompt and max_total; larger ones are right")

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yields the tokens of prompts and answers, without end."""
        while True:
            yield from in_pieces(self.draw(rng, _AT_ONCE))

    def _fits(self, pairs: I64) -> AnyArray:
        most, total = self.max_prompt or LONGEST, self.max_total or 2 * LONGEST
        fits: AnyArray = (pairs[:, 0] <= most) & (pairs.sum(axis=1) <= total)
        return fits


LengthSpec = Annotated[Lengths, BeforeValidator(_both_sides)]


class Drift(Section):
    """Each model's weight goes up and down once in `period` seconds, each at a time of its own: by a factor
    of e^swing at most. The rate of all models together stays as it is."""

    swing: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
    period: Seconds = DAY

    def rates(self, rates: F64, phases: F64) -> F64:
        """Returns [models, STEPS] requests a second.

        `rates` [models] are requests a second without drift. `phases` [models] are places in the period, in
        [0, 1)."""
        turns = np.arange(STEPS) / STEPS
        weights = rates[:, None] * np.exp(self.swing * np.sin(2 * np.pi * (turns + phases[:, None])))
        drifted: F64 = weights * (rates.sum() / weights.sum(axis=0))
        return drifted


class SystemPrompts(Section):
    """A `share` of a model's requests begins with one of its `kinds` system prompts, `tokens` tokens each."""

    tokens: TokenCount
    kinds: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    share: Share = 1.0


class Conversations(Section):
    """Requests that are turns of conversations, open loop: a turn comes whether or not the answer to the one
    before has come."""

    turns: Annotated[float, Field(ge=1, le=1e4, allow_inf_nan=False)]
    """The mean number of turns, which is geometrically distributed."""
    pause: Seconds
    """The mean time from one turn's arrival to the next one's, which is exponentially distributed."""
    max_context: TokenCount = LONGEST
    """The tokens at which a conversation ends: it ends before the turn that would need more, but not before
    its first."""


class ReplaySpec(Section):
    """A trace that is replayed."""

    file: Annotated[str, Field(min_length=1)]
    rate_scale: _Scale = 1.0
    """The factor of the trace's rate."""
    length_scale: _Scale = 1.0
    """The factor of the requests' tokens."""
    max_total: TokenCount | None = None
    """The most tokens of a scaled request. Longer requests are left out."""


class ModelSpec(Section):
    """Settings of one model. Those that are None are as they are for all models."""

    rate: Rate | None = None
    """The requests a second of the model."""
    arrivals: Process | None = None
    lengths: LengthSpec | None = None
    priorities: Priorities | None = None
    system: SystemPrompts | None = None
    conversation: Conversations | None = None


class WorkloadSpec(Section):
    """The file of a workload."""

    name: Name = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    vocab: Annotated[int, Field(ge=32, lt=2**31)] = VOCAB
    """The bound of token ids: prompts are made of ids below it."""
    seconds: Seconds | None = None
    requests: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    models: Annotated[dict[Name, ModelSpec], BeforeValidator(_named), Field(min_length=1, max_length=4096)]
    rate: Rate | None = None
    """The requests a second of all models together."""
    top_rate: Rate | None = None
    """The requests a second of the most popular model."""
    alpha: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)] = 0.0
    """The exponent of the power law by which the rates fall, in the order of `models`."""
    drift: Drift | None = None
    arrivals: Process = poisson
    lengths: LengthSpec = Lengths.model_validate({"prompt": "sharegpt", "output": "sharegpt"})
    priorities: Priorities | None = None
    system: SystemPrompts | None = None
    conversation: Conversations | None = None
    replay: ReplaySpec | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        self._check_own_rates()
        if self.replay is None:
            self._check_end_and_rate()
            return self
        for key in _OF_A_TRACE:
            set_for = next((name for name, each in self.models.items() if key in each.model_fields_set), None)
            if key in self.model_fields_set or (set_for and key != "rate"):
                where = key if key in self.model_fields_set else f"models.{set_for}.{key}"
                raise ValueError(f"{where}: a replayed trace has its own; no such key is right")
        return self

    def _check_end_and_rate(self) -> None:
        if self.seconds is None and self.requests is None:
            raise ValueError("seconds: is missing; seconds, requests or both say where the workload ends")
        own = any(model.rate is not None for model in self.models.values())
        if (self.rate is not None) + (self.top_rate is not None) + own != 1:
            raise ValueError("rate: one of rate, top_rate, and a rate for each model is right")

    def _check_own_rates(self) -> None:
        own = [name for name, model in self.models.items() if model.rate is not None]
        if own and len(own) < len(self.models):
            missing = next(name for name in self.models if name not in own)
            raise ValueError(f"models.{missing}.rate: is missing; the other models have one")
        if own and self.alpha:
            raise ValueError("alpha: the models have rates of their own; rate or top_rate goes with alpha")
