"""A plan: units, the models on each, and what is expected of them. `serve` and `simulate` both take it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvloom.core.errors import ConfigError
from kvloom.cost.shape import ModelShape

PLAN_VERSION = 1

_Share = Annotated[float, Meta(gt=0.0, le=1.0)]
_Rate = Annotated[float, Meta(ge=0.0)]
_Name = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00-\x1f]+$")]


class PlannedModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a unit. path: its checkpoint, where there is one. rate: requests a second that come to it
    here; throughput: requests a second that it could answer, if so many came. prompt, output: mean tokens.
    Shares are of the unit's compute; quota: of its KV blocks."""

    name: _Name
    path: str | None
    shape: ModelShape
    rate: _Rate
    prompt: _Rate
    output: _Rate
    prefill_share: _Share
    decode_share: _Share
    quota: _Share
    throughput: _Rate


class PlannedUnit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gpus` devices of kind `device` on one node work as one. kv_bytes: its pool, over all of them."""

    name: _Name
    node: str
    device: str
    gpus: Annotated[int, Meta(ge=1, le=4096)]
    kv_bytes: Annotated[int, Meta(ge=1, le=2**42)]
    models: tuple[PlannedModel, ...]

    def check_pool(self, block_bytes: int) -> None:
        """Raises ConfigError where the pool, in blocks of so many bytes, holds no page of a model."""
        for model in self.models:
            page = model.shape.geometry(block_bytes).blocks_per_page * block_bytes
            if page > self.kv_bytes:
                raise ConfigError(
                    f"{self.name}: kv_bytes {self.kv_bytes:,} hold no page of {model.name}; "
                    f"at least {page:,} are right"
                )


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """throughput: the sum of what each model is expected to answer, at most its rate. made_by: how, in one
    line."""

    version: int = PLAN_VERSION
    units: tuple[PlannedUnit, ...]
    throughput: float
    made_by: str
