"""INFaaS++ that knows what instances have reported, and not what it has sent since.

The paper does not say whether its dispatchers count what they send. kvloom's gateway does, under every
program: so a burst spreads between two reports, whoever decides.
"""

from __future__ import annotations

from kvloom.cluster.dispatch import infaas
from kvloom.router import Call, Fleet, Frames


async def infaas_by_reports(call: Call, fleet: Fleet) -> Frames:
    """To the instance that had least memory in use when it reported; among equals by turns."""
    loads = {replica: load for replica in fleet.up if (load := replica.unit.report.reported())}
    chosen = infaas(loads, {replica: replica.turn for replica in loads}, fleet.arrival)
    replica = fleet.least_loaded() if chosen is None else fleet.turn([chosen])
    async for frame in call.start_generate(replica):
        yield frame
