"""The process of the fleet scheduler: `python -m kvloom.serve.scheduler_process FD NAME`.

It keeps nothing: gateways may come and go, and so may this process. Never imports torch, nor what serves.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvloom.cluster.freeness import Thresholds
from kvloom.cluster.scheduler import FleetScheduler
from kvloom.serve.fleet_client import FleetClient
from kvloom.serve.orders import Ready, SchedulerOrder
from kvloom.serve.parent import Parent, run_child
from kvloom.types.clock import WallClock


def main(parent: Parent) -> None:
    order = parent.order(SchedulerOrder)
    parent.watch(Path(order.folder))
    parent.report(Ready())
    asyncio.run(schedule(order))  # until SIGTERM, which may end it anywhere


async def schedule(order: SchedulerOrder) -> None:
    spec, client = order.spec, FleetClient(order.gateway, secret=order.secret)
    scheduler = FleetScheduler(
        client, WallClock(), period=spec.period, thresholds=Thresholds(spec.out, spec.into)
    )
    await scheduler.run()


if __name__ == "__main__":
    run_child(main)
