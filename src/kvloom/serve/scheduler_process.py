"""The process of the fleet scheduler: `python -m kvloom.serve.scheduler_process FD NAME`.

It keeps nothing: gateways may come and go, and so may this process. Never imports torch, nor what serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from kvloom.cluster.scheduler import EveryGateway, FleetScheduler
from kvloom.engine.freeness import Thresholds
from kvloom.serve.processes.gateways import FleetClient
from kvloom.serve.processes.identity import calling_context
from kvloom.serve.processes.messages import Gateways, Ready, SchedulerOrder, Told
from kvloom.serve.processes.parent import Parent, run_child
from kvloom.types.clock import WallClock, together


class KnownGateways:
    """The gateways that there are: whoever listens at this host's socket, or those of which the controller
    has told."""

    def __init__(self, order: SchedulerOrder) -> None:
        self._secret = order.secret
        self._tls = None if order.identity is None else calling_context(order.identity)
        self.clients = self._all([order.gateway] if order.gateway else [])

    def heed(self, told: Told) -> None:
        """Takes in what the controller says, on any thread."""
        if isinstance(told, Gateways):
            self.clients = self._all(told.endpoints)

    def _all(self, where: Iterable[str]) -> list[FleetClient]:
        return [FleetClient(one, secret=self._secret, tls=self._tls) for one in where]


def main(parent: Parent) -> None:
    order = parent.next_order(SchedulerOrder)
    gateways = KnownGateways(order)
    parent.watch(Path(order.sockets), gateways.heed)
    asyncio.run(serve(parent, order, gateways))  # until SIGTERM, which may end it anywhere


async def serve(parent: Parent, order: SchedulerOrder, gateways: KnownGateways) -> None:
    async with together() as tasks:
        tasks.create_task(parent.beat())
        parent.report(Ready())
        await schedule(order, gateways)


async def schedule(order: SchedulerOrder, gateways: KnownGateways) -> None:
    spec = order.spec
    scheduler = FleetScheduler(
        EveryGateway(lambda: gateways.clients),
        WallClock(),
        period=spec.period,
        thresholds=Thresholds(spec.out, spec.into),
    )
    await scheduler.run()


if __name__ == "__main__":
    run_child(main)
