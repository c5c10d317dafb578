"""What batching policies see of a model."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Final

from kvloom.core.job import Phase
from kvloom.engine.batching.view import ModelView
from kvloom.engine.model_queue import ModelQueue

_NOBODY: Final = (0, 0, 0)
_ORDER = attrgetter("order")


class View:
    """Of one model. Looked at anew only where something has changed: policies are asked several times a job,
    and there may be hundreds of sequences."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue
        self._seen: tuple[tuple[object, ...], ModelView, int | None] | None = None

    def at(self, now: int) -> ModelView:
        """now: jobs that the unit has started."""
        queue = self._queue
        places = queue.woven and queue.woven.places.mark
        mark = queue.changes, queue.tally.changes, queue.cache.changes, queue.quota, places
        if self._seen is None or self._seen[0] != mark:
            self._seen = mark, *look(queue)
        _, view, since = self._seen
        waited = 0 if since is None else now - since
        return view if waited == view.waited else replace(view, waited=waited)


def look(queue: ModelQueue) -> tuple[ModelView, int | None]:
    """The view, and since when its head has waited."""
    idle = [s for s in queue.running if not s.in_job]
    here = [s for s in idle if queue.is_here(s)]
    ready = [s for s, _ in queue.decode_batch()]
    begun = [s for s in idle if not s.decodes]
    room = len(queue.running) < queue.max_running
    head = begun[0] if begun else queue.waiting[0] if queue.waiting and room else None
    tally = queue.tally
    view = ModelView(
        name=queue.card.name,
        waiting=len(queue.waiting) if room else 0,
        partial=len(begun),
        head_blocks=queue.blocks([head], to_end=True) if head else 0,
        head=head.order if head else _NOBODY,
        decodable=len(ready),
        decode_blocks=queue.cache.blocks_for_each(queue.takers(ready), 1),
        held=len(here),
        victim=max(map(_ORDER, here), default=_NOBODY),
        running=len(queue.running),
        prefilling=tally.active[Phase.PREFILL] > 0,
        decoding=tally.active[Phase.DECODE] > 0,
        used=queue.cache.used_blocks,
        quota=queue.quota,
        page_blocks=queue.cache.geometry.blocks_per_page,
        last_prefill=tally.last[Phase.PREFILL],
        last_decode=tally.last[Phase.DECODE],
        waited=0,
        prefill_share=queue.shares[0],
        decode_share=queue.shares[1],
    )
    return view, head.waiting_since if head else None
