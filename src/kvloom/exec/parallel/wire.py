"""The messages between the first rank and the others, beside what they exchange while they compute."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from kvloom.types.geometry import I32, I64, AnyArray, Geometry
from kvloom.types.job import ForwardPlan, Job, PageCopy, Phase
from kvloom.types.spec import EngineSpec

_LENGTH: Final = struct.Struct("<I")


class StartRank(Struct, frozen=True, kw_only=True, tag="begin"):
    """Tells a rank to load the unit's models and take an arena. store: the file by which the ranks find each
    other."""

    rank: int
    store: str
    spec: EngineSpec

    @property
    def size(self) -> int:
        return self.spec.tensor_parallel

    @property
    def threads(self) -> int:
        """The cores of each rank."""
        return self.spec.threads // self.size

    @property
    def slots(self) -> int:
        """The jobs that may run at the same time; one on GPUs, for exchanges of two that met on one device in
        another order than on the next would wait for each other."""
        return self.threads if self.spec.device == "cpu" else 1


class Go(Struct, frozen=True, tag="go"):
    """Tells a waiting rank that all ranks have come as far."""


class Step(Struct, frozen=True, kw_only=True, tag="step"):
    """One forward. Arrays are their little-endian bytes, in the forms that `ForwardPlan` gives: tables,
    slot_page, slot_offset, pages and blocks are int32, the others int64."""

    slot: int
    model: str
    phase: Phase
    share: int
    tokens: bytearray
    kept: bytearray  # rows whose logits are wanted
    appends: bytearray
    starts: bytearray
    tables: bytearray
    positions: bytearray
    slot_page: bytearray
    slot_offset: bytearray
    pages: bytearray  # [n] rows of the page map that have changed since the last step
    blocks: bytearray  # [n, layers, heads], those rows
    copies: list[tuple[int, int, int]] = []  # source, target and tokens of each


class RankReady(Struct, frozen=True, tag="here"):
    """The rank waits for `Go`."""


class RankRefused(Struct, frozen=True, tag="refused"):
    """The rank ends, because what it was given cannot be used."""

    message: str


Order = StartRank | Go | Step
Report = RankReady | RankRefused


class Wire:
    """One end of a stream socket. A message is the length of its msgpack, as 4 bytes, and that.

    seconds: how long a message is kept up that the peer does not take; None for ever.
    """

    def __init__(self, end: socket.socket, seconds: int | None = None) -> None:
        self._end = end
        if seconds is not None:
            timeout = struct.pack("ll", seconds, 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def send(self, message: Order | Report) -> None:
        """Sends a message. Raises OSError if the peer is gone, or takes nothing."""
        body = msgspec.msgpack.encode(message)
        self._end.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> bytearray | None:
        """Returns the next message's msgpack, or None if the peer is gone."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(*_LENGTH.unpack(head))

    def close(self) -> None:
        self._end.close()

    def _read(self, count: int) -> bytearray | None:
        body = bytearray(count)
        left = memoryview(body)
        while left:
            try:
                got = self._end.recv_into(left)
            except OSError:
                return None
            if not got:
                return None
            left = left[got:]
        return body


class SentMaps:
    """The version that the other ranks have of each row of a model's page map. Steps must be sent in the
    order in which they were made here."""

    def __init__(self, geometries: Mapping[str, Geometry], blocks: int) -> None:
        self._known: dict[str, I64] = {
            name: np.zeros(blocks // geometry.blocks_per_page, dtype=np.int64)
            for name, geometry in geometries.items()
        }
        self._widths = {name: geometry.tokens_per_block for name, geometry in geometries.items()}

    def step(self, slot: int, job: Job, kept: I64) -> Step:
        plan = job.plan
        pages = self._changed(job.model, plan)
        return Step(
            slot=slot,
            model=job.model,
            phase=job.phase,
            share=job.share,
            tokens=_bytes(job.tokens),
            kept=_bytes(kept),
            appends=_bytes(plan.appends),
            starts=_bytes(plan.starts),
            tables=_bytes(plan.tables),
            positions=_bytes(plan.positions),
            slot_page=_bytes(plan.slot_page),
            slot_offset=_bytes(plan.slot_offset),
            pages=_bytes(pages),
            blocks=_bytes(plan.page_map[pages]),
            copies=[(copy.source, copy.target, copy.tokens) for copy in plan.copies],
        )

    def _changed(self, model: str, plan: ForwardPlan) -> I32:
        """Returns the plan's pages whose rows the others do not know; they do from now on. Other rows may be
        changing this moment, and are not read. What is copied from was an earlier plan's, and is known."""
        counts = -(-(plan.starts + plan.appends) // self._widths[model])
        used = np.unique(plan.tables[np.arange(plan.tables.shape[1]) < counts[:, None]])
        assert plan.versions is not None
        known, now = self._known[model], plan.versions[used]
        changed = known[used] != now
        known[used] = now
        pages: I32 = used[changed]
        return pages


class ToldMap:
    """A copy of a model's page map at another rank: [pages, layers, heads] of a pool that nobody has used
    yet. A row's version changes with the row."""

    def __init__(self, geometry: Geometry, blocks: int) -> None:
        pages = blocks // geometry.blocks_per_page
        shape = (pages, geometry.layers, geometry.kv_heads)
        self.rows: I32 = np.full(shape, -1, dtype=np.int32)
        self.versions: I64 = np.zeros(pages, dtype=np.int64)

    def plan(self, step: Step) -> ForwardPlan:
        """Returns the plan as the first rank has it, over this map, which learns of what has changed. Steps
        are taken in the order in which they come."""
        pages = _array(step.pages, np.int32)
        self.rows[pages] = _array(step.blocks, np.int32).reshape(len(pages), *self.rows.shape[1:])
        self.versions[pages] += 1  # after the row: a job may be reading both
        appends = _array(step.appends, np.int64)
        return ForwardPlan(
            model=step.model,
            sequences=tuple(range(len(appends))),
            appends=appends,
            starts=_array(step.starts, np.int64),
            page_map=self.rows,
            tables=_array(step.tables, np.int32).reshape(len(appends), -1),
            positions=_array(step.positions, np.int64),
            slot_page=_array(step.slot_page, np.int32),
            slot_offset=_array(step.slot_offset, np.int32),
            copies=tuple(PageCopy(*copy) for copy in step.copies),
            versions=self.versions,
        )


def ids_of(step: Step) -> tuple[I64, I64]:
    """Returns tokens and kept rows."""
    return _array(step.tokens, np.int64), _array(step.kept, np.int64)


def _bytes(array: AnyArray) -> bytearray:
    return bytearray(array.tobytes())


def _array(given: bytearray, kind: type[np.int32] | type[np.int64]) -> AnyArray:
    return np.frombuffer(given, dtype=kind)
