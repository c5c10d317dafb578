"""A job's plan on its way to the other ranks, and there again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvloom.core.arrays import I32, I64, AnyArray
from kvloom.core.geometry import Geometry
from kvloom.core.job import Job
from kvloom.core.plan import PageCopy, Plan
from kvloom.model.parallel.wire import Step


class SentMaps:
    """Which version the other ranks have of each row of a model's page map. Steps must be sent in the order
    in which they were made here."""

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

    def _changed(self, model: str, plan: Plan) -> I32:
        """The plan's pages whose rows the others do not know; they do from now on. Other rows may be changing
        this moment, and are not read. What is copied from was an earlier plan's, and is known."""
        counts = -(-(plan.starts + plan.appends) // self._widths[model])
        used = np.unique(plan.tables[np.arange(plan.tables.shape[1]) < counts[:, None]])
        assert plan.versions is not None
        known, now = self._known[model], plan.versions[used]
        changed = known[used] != now
        known[used] = now
        pages: I32 = used[changed]
        return pages


class ToldMap:
    """What another rank knows of a model's page map: [pages, layers, heads] of a pool that nobody has used
    yet. A row's version changes with the row."""

    def __init__(self, geometry: Geometry, blocks: int) -> None:
        pages = blocks // geometry.blocks_per_page
        shape = (pages, geometry.layers, geometry.kv_heads)
        self.rows: I32 = np.full(shape, -1, dtype=np.int32)
        self.versions: I64 = np.zeros(pages, dtype=np.int64)

    def plan(self, step: Step) -> Plan:
        """As the first rank has it, over this map, which learns of what has changed. In the order in which
        steps come."""
        pages = _array(step.pages, np.int32)
        self.rows[pages] = _array(step.blocks, np.int32).reshape(len(pages), *self.rows.shape[1:])
        self.versions[pages] += 1  # after the row: a job may be reading both
        appends = _array(step.appends, np.int64)
        return Plan(
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
    """Tokens and kept rows."""
    return _array(step.tokens, np.int64), _array(step.kept, np.int64)


def _bytes(array: AnyArray) -> bytearray:
    return bytearray(array.tobytes())


def _array(given: bytearray, kind: type[np.int32] | type[np.int64]) -> AnyArray:
    return np.frombuffer(given, dtype=kind)
