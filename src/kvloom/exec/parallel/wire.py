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


class Go(Struct, frozen=True, tag="go", omit_defaults=True):
    """Tells a waiting rank that all ranks have come as far. arena: the file of the arena that all ranks have
    together, if they have and it is there."""

    arena: str = ""


_KINDS: Final[dict[str, type[np.generic]]] = {
    "tokens": np.int64,
    "kept": np.int64,  # rows whose logits are wanted
    "appends": np.int64,
    "starts": np.int64,
    "tables": np.int32,
    "positions": np.int64,
    "slot_page": np.int32,
    "slot_offset": np.int32,
    "pages": np.int32,  # [n] rows of the page map that have changed since the last step
    "blocks": np.int32,  # [n, layers, heads], those rows
}


class Step(Struct, frozen=True, kw_only=True, tag="step"):
    """One forward. arrays: those of `_KINDS`, the plan's in the forms that `ForwardPlan` gives, as their
    little-endian bytes."""

    slot: int
    model: str
    phase: Phase
    share: int
    arrays: dict[str, bytearray]
    copies: list[tuple[int, int, int]] = []  # source, target and tokens of each

    def array(self, name: str) -> AnyArray:
        """Returns one of the arrays, without its shape."""
        return np.frombuffer(self.arrays[name], dtype=_KINDS[name])


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
        arrays: dict[str, AnyArray] = {"tokens": job.tokens, "kept": kept}
        arrays |= {"pages": pages, "blocks": plan.page_map[pages]}
        arrays |= {name: getattr(plan, name) for name in _KINDS if name not in arrays}
        return Step(
            slot=slot,
            model=job.model,
            phase=job.phase,
            share=job.share,
            arrays={name: bytearray(array.tobytes()) for name, array in arrays.items()},
            copies=[(copy.source, copy.target, copy.tokens) for copy in plan.copies],
        )

    def _changed(self, model: str, plan: ForwardPlan) -> I32:
        """Returns the plan's pages whose rows the others do not know; they do from now on. Other rows may be
        changing this moment, and are not read. What is copied from may have come from a peer, and be in no
        earlier plan."""
        counts = -(-(plan.starts + plan.appends) // self._widths[model])
        held = plan.tables[np.arange(plan.tables.shape[1]) < counts[:, None]]
        used = np.unique(np.concatenate((held, [copy.source for copy in plan.copies])).astype(np.int32))
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
        pages = step.array("pages")
        self.rows[pages] = step.array("blocks").reshape(len(pages), *self.rows.shape[1:])
        self.versions[pages] += 1  # after the row: a job may be reading both
        appends = step.array("appends")
        return ForwardPlan(
            model=step.model,
            sequences=tuple(range(len(appends))),
            appends=appends,
            starts=step.array("starts"),
            page_map=self.rows,
            tables=step.array("tables").reshape(len(appends), -1),
            positions=step.array("positions"),
            slot_page=step.array("slot_page"),
            slot_offset=step.array("slot_offset"),
            copies=tuple(PageCopy(*copy) for copy in step.copies),
            versions=self.versions,
        )
