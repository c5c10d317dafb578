"""What a workload is made from: the keys of its YAML or JSON file."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvloom.workload.arrivals import Process, poisson
from kvloom.workload.fields import Name, Rate, Seconds, Section, Share, TokenCount, shown
from kvloom.workload.lengths import Lengths
from kvloom.workload.popularity import Drift
from kvloom.workload.sharing import Conversations, SystemPrompts

VOCAB: Final = 256
_OF_A_TRACE: Final = ("rate", "top_rate", "drift", "arrivals", "lengths", "system", "conversation")

_Scale = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]


def _both_sides(value: Any) -> Any:
    return {"prompt": value, "output": value} if isinstance(value, str) else value


def _whole_keys(value: Any) -> Any:
    """JSON's keys are texts."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) else key: share for key, share in value.items()}


def _some_share(value: dict[int, float]) -> dict[int, float]:
    if not sum(value.values()) > 0:
        raise ValueError(f"{shown(value)}; {{priority: share}}, as `{{-1: 0.1, 0: 0.9}}`, is right")
    return value


def _named(value: Any) -> Any:
    """A list of names is a mapping without settings."""
    if isinstance(value, list):
        if not all(isinstance(name, str) and name for name in value) or len(set(value)) != len(value):
            raise ValueError(f"{shown(value)}; a list of names, each once, is right")
        return {name: {} for name in value}
    return {name: each or {} for name, each in value.items()} if isinstance(value, dict) else value


LengthSpec = Annotated[Lengths, BeforeValidator(_both_sides)]
Priorities = Annotated[
    dict[int, Share], BeforeValidator(_whole_keys), Field(min_length=1), AfterValidator(_some_share)
]


class ReplaySpec(Section):
    """A trace: its rate multiplied by rate_scale, its tokens by length_scale; what is longer than max_total
    tokens then is left out."""

    file: Annotated[str, Field(min_length=1)]
    rate_scale: _Scale = 1.0
    length_scale: _Scale = 1.0
    max_total: TokenCount | None = None


class ModelSpec(Section):
    """What is None is as it is for all models. rate: requests a second."""

    rate: Rate | None = None
    arrivals: Process | None = None
    lengths: LengthSpec | None = None
    priorities: Priorities | None = None
    system: SystemPrompts | None = None
    conversation: Conversations | None = None


class WorkloadSpec(Section):
    """rate: of all models together; top_rate: of the most popular one. alpha: of the power law by which the
    rates fall, in the order of `models`. vocab: prompts are made of token ids below it."""

    name: Name = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    vocab: Annotated[int, Field(ge=32, lt=2**31)] = VOCAB
    seconds: Seconds | None = None
    requests: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    models: Annotated[dict[Name, ModelSpec], BeforeValidator(_named), Field(min_length=1, max_length=4096)]
    rate: Rate | None = None
    top_rate: Rate | None = None
    alpha: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)] = 0.0
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
