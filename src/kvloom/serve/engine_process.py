"""The process of one engine: `python -m kvloom.serve.engine_process FD NAME`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from kvloom.serve.processes.lease import HeldLease, count_as_running
from kvloom.serve.processes.messages import EngineOrder, Lease, StartProgress, Told
from kvloom.serve.processes.parent import Parent, run_child


def main(parent: Parent) -> None:
    order = parent.next_order(EngineOrder)
    if order.running:
        count_as_running(Path(order.running))
    lease = HeldLease(order.lease) if order.lease is not None else None

    def heed(told: Told) -> None:
        if lease is not None and isinstance(told, Lease):
            lease.renew(told.until)

    parent.watch(Path(order.socket).parent, heed)
    parent.report(StartProgress("starting the engine"))
    from kvloom.serve.engine import serve  # noqa: PLC0415 -- for seconds, because it imports torch

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parent, order, lease))


if __name__ == "__main__":
    run_child(main)
