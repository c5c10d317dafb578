"""A model's page map on the device, kept like the host's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch

from kvloom.core.arrays import I64, AnyArray
from kvloom.core.geometry import Geometry
from kvloom.core.plan import Plan
from kvloom.model.gpu.partitions import Lane
from kvloom.model.gpu.staging import Sent
from kvloom.model.gpu.streams import Mark

Send = Callable[[Mapping[str, AnyArray]], Sent]


class DevicePageMap:
    """blocks: [pages, layers, kv_heads] on the device. A row that has changed travels with the job that is
    the first to need it; jobs on other lanes wait for that copy, and for nothing else."""

    def __init__(self, geometry: Geometry, pages: int, device: torch.device) -> None:
        shape = (pages, geometry.layers, geometry.kv_heads)
        self.blocks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._versions: I64 = np.full(pages, -1, dtype=np.int64)
        self._counted: I64 | None = None  # by whom: another pool counts anew
        self._updates: dict[Lane, Mark] = {}
        self._lock = threading.Lock()

    def refresh(self, plan: Plan, lane: Lane, send: Send) -> Sent:
        """On the lane's stream, whose job has the plan: the map is right for its pages from here on. send:
        puts arrays onto the device, with whatever else the job needs; what it returns is returned."""
        with self._lock:
            pages, seen = self._stale(plan)
            sent = send({"map_pages": pages, "map_rows": plan.page_map[pages]})
            for other, mark in self._updates.items():
                if other is not lane:
                    lane.stream.follow(mark)
            if pages.size:
                self.blocks.index_copy_(0, sent.arrays["map_pages"], sent.arrays["map_rows"])
                self._updates[lane] = lane.mark()
                self._versions[pages] = seen
        return sent

    def _stale(self, plan: Plan) -> tuple[I64, I64]:
        """Of the pages that the forward may read or write those whose rows the device has not, and the rows'
        versions. Entries of a table past a sequence's own pages do no harm: their rows come again when they
        are somebody's."""
        if plan.versions is not self._counted:
            self._counted = plan.versions
            self._versions[:] = -1
        copied = [page for copy in plan.copies for page in (copy.source, copy.target)]
        pages = np.concatenate((plan.tables.ravel(), np.asarray(copied, dtype=np.int32)))
        if plan.versions is not None:
            pages = pages[plan.versions[pages] != self._versions[pages]]
        stale: I64 = np.unique(pages).astype(np.int64)
        # before the rows are read: one that changes meanwhile is of no page of this plan, and comes again
        seen = plan.versions[stale] if plan.versions is not None else np.full(stale.size, -1)
        return stale, seen
