"""Room at a replica for what a running request has computed at another."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvloom.router.holdings import REFUSALS
from kvloom.router.replica import Replica
from kvloom.types.errors import KvloomError
from kvloom.types.verbs import Prepared, PrepRecv, RemoteSend


class Room:
    """For the K and V of `context`, under an id of its own. request: the id of what runs at `source`."""

    def __init__(
        self, name: str, context: list[int], *, source: Replica, target: Replica, request: str, priority: int
    ) -> None:
        self.name = name
        self.context = context
        self._source = source
        self._target = target
        self._request = request
        self._priority = priority
        self._asked: asyncio.Future[Prepared] | None = None

    async def reserve(self, end: int, *, due: float | None = None) -> None:
        """Up to `end`. due: seconds until the request is to begin at the target. Who stops waiting for the
        answer still has to free it."""
        body = PrepRecv(
            model=self._source.card.name,
            request=self.name,
            prompt=self.context,
            end=end,
            sender=self._source.form,
            due=due,
        )
        self._asked = asyncio.ensure_future(self._target.client.prep_recv(body))
        await asyncio.shield(self._asked)

    @property
    def matched(self) -> int:
        """Tokens that the target had already."""
        return self._spot.matched

    def order(self, end: int | None = None) -> RemoteSend | None:
        """For the source to fill it, up to `end` or as far as there is room; None where nothing is to be
        sent."""
        spot = self._spot
        end = spot.end if end is None else min(end, spot.end)
        if spot.matched >= end:
            return None
        return RemoteSend(
            model=self._source.card.name,
            request=self._request,
            prompt=self.context,
            address=spot.address,
            peer=spot.peer,
            begin=spot.matched,
            end=end,
            priority=self._priority,
        )

    async def fill(self, end: int) -> None:
        """From the source, up to `end` or as far as there is room."""
        if order := self.order(end):
            await self._source.client.remote_send(order)

    @property
    def _spot(self) -> Prepared:
        assert self._asked is not None, "reserve comes first"
        return self._asked.result()

    async def free(self) -> None:
        """What has arrived stays cached. Where the target does not answer its lease ends it."""
        asked, self._asked = self._asked, None
        if asked is not None:
            await asyncio.wait([asked])
            if not isinstance(asked.exception(), REFUSALS):
                with suppress(KvloomError):
                    await self._target.client.abort(self.name)
