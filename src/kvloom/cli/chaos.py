"""`kvloom chaos`: runs in which things go wrong."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from kvloom.cli.app import Whole
from kvloom.lab.faults.chaos import chaos

app = App(name="chaos")


@app.default
def chaos_command(
    *,
    seeds: Annotated[Whole, Parameter(help="runs")] = 100,
    first: Annotated[Whole, Parameter(help="the first run's seed")] = 0,
    jobs: Annotated[Whole, Parameter(help="runs at a time")] = 1,
    replay: Annotated[
        Whole | None, Parameter(help="tell one run event by event, whether it fails or not")
    ] = None,
) -> int:
    """Run kvloom's own engines and router in virtual time while things go wrong.

    Engines die, gateways are lost, calls are lost, late or doubled, streams break, links are slow, jobs fail,
    clients hang up, pools are tiny. Each seed is one run, after which the laws are checked: no block is lost,
    no token is another, no stream is silently short, nothing leaks, nobody waits for ever. The first that
    breaks one is replayed event by event."""
    return chaos(seeds=seeds, first=first, jobs=jobs, replay=replay)
