"""Samples of a fleet: what each unit and each model has at one moment, in the numbers of `/metrics`. They
hold nothing of prompts or answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvloom.types.load import ModelLoad, UnitLoad

KEPT_SECONDS: Final = 3600.0
STEP_SECONDS: Final = 10.0  # between two samples that are kept
KEPT_BYTES: Final = 8 << 20


class Wave(Struct, frozen=True):
    """The wait of another unit's tasks at a unit that lends to it."""

    peer: str
    """The name of the unit that borrows; empty if that is not known."""
    wait_seconds: float


class UnitModel(Struct, frozen=True, kw_only=True):
    """A model at a unit. Blocks are the pool's; tokens and preemptions are totals since the engine began."""

    model: str
    waiting: int
    oldest: float
    """The seconds for which the sequence that waits longest has waited."""
    running: int
    used: int
    cached: int
    pinned: int
    quota: int
    weights: int
    awake: bool
    away: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int


class UnitSample(Struct, frozen=True, kw_only=True):
    """A unit. A unit that does not answer has no blocks and no models."""

    unit: str
    state: str
    """The unit's `Service` (`types/service.py`)."""
    node: str
    blocks: int
    free: int
    lent: int
    block_bytes: int
    models: tuple[UnitModel, ...]
    waves: tuple[Wave, ...] | UnsetType = UNSET


class ModelTotals(Struct, frozen=True, kw_only=True):
    """The answers of a model so far: the count of requests, and the sums of their times in seconds. Rates and
    means over a span follow from two of them."""

    model: str
    requests: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    tpot_sum: float = 0.0
    tpot_count: int = 0


class Sample(Struct, frozen=True, kw_only=True):
    """A fleet at one moment."""

    at: float
    """The time of the sample, in seconds of Unix time, or of virtual time."""
    units: tuple[UnitSample, ...]
    models: tuple[ModelTotals, ...]


def make_sample(
    at: float,
    loads: Mapping[str, UnitLoad],
    services: Mapping[str, str],
    totals: tuple[ModelTotals, ...] = (),
    *,
    homes: Mapping[str, str] = MappingProxyType({}),
    borrowers: Mapping[str, str] = MappingProxyType({}),
) -> Sample:
    """Returns a sample of what `/metrics` tells. `loads` are those of the units that answer, `services` the
    states of all units, `homes` the nodes of units, if there are several, and `borrowers` tells who borrows
    from a unit."""
    units = tuple(
        _unit(name, service, homes.get(name, ""), loads.get(name), borrowers.get(name, ""))
        for name, service in services.items()
    )
    return Sample(at=at, units=units, models=totals)


def _unit(name: str, state: str, node: str, load: UnitLoad | None, borrower: str) -> UnitSample:
    if load is None:
        return UnitSample(
            unit=name, state=state, node=node, blocks=0, free=0, lent=0, block_bytes=0, models=()
        )
    return UnitSample(
        unit=name,
        state=state,
        node=node,
        blocks=load.total_blocks,
        free=load.free_blocks,
        lent=load.lent_blocks,
        block_bytes=load.block_bytes,
        models=tuple(_model(model, one) for model, one in load.models.items()),
        waves=UNSET if load.waits is None else (Wave(borrower, load.waits.wait),),
    )


def _model(name: str, load: ModelLoad) -> UnitModel:
    return UnitModel(
        model=name,
        waiting=load.waiting,
        oldest=round(load.oldest_wait, 6),
        running=load.running,
        used=load.used_blocks,
        cached=load.cached_blocks,
        pinned=load.pinned_blocks,
        quota=load.quota_blocks,
        weights=0 if load.weights is None else load.weights.blocks,
        awake=load.weights is None or load.weights.awake,
        away=load.away,
        prompt_tokens=load.prompt_tokens_total,
        cached_tokens=load.cached_tokens_total,
        output_tokens=load.output_tokens_total,
        preemptions=load.preemptions_total,
    )


class SampleHistory:
    """The encoded samples of the last hour, one in each step, and no more than `most` bytes. If they find no
    room, every second one goes and the steps are twice as long, so that it stays an hour."""

    def __init__(self, *, most: int = KEPT_BYTES, seconds: float = KEPT_SECONDS) -> None:
        self.step = STEP_SECONDS
        self.size = 0
        """The bytes of all samples that are kept."""
        self._most = most
        self._seconds = seconds
        self._kept: list[tuple[float, bytes]] = []

    def due(self, at: float) -> bool:
        """Returns whether a sample of this time is to be kept. A clock that was set back is no reason to
        wait."""
        return not self._kept or not 0 <= at - self._kept[-1][0] < self.step

    def keep(self, at: float, encoded: bytes) -> None:
        """Keeps a sample, if one is due and it alone finds room."""
        if not self.due(at) or len(encoded) > self._most:
            return
        self._kept.append((at, encoded))
        self.size += len(encoded)
        self._keep_only([one for one in self._kept if at - self._seconds <= one[0] <= at])
        while self.size > self._most:
            self.step *= 2
            self._keep_only(self._kept[::-2][::-1])  # the last one stays

    def since(self, at: float) -> Iterator[bytes]:
        """Yields what is kept of the time after `at`."""
        yield from [encoded for when, encoded in self._kept if when > at]

    def _keep_only(self, kept: list[tuple[float, bytes]]) -> None:
        if len(kept) < len(self._kept):
            self._kept = kept
            self.size = sum(len(encoded) for _, encoded in kept)


encode_sample = msgspec.json.Encoder().encode
