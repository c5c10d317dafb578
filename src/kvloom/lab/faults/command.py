"""`kvloom chaos`: runs in which things go wrong."""

from __future__ import annotations

import argparse
from typing import Any, Final

ABOUT: Final = """\
Run kvloom's own engines and router in virtual time while things go wrong: engines die, gateways are lost,
calls are lost, late or doubled, streams break, links are slow, jobs fail, clients hang up, pools are tiny.
Each seed is one run, after which the laws are checked: no block is lost, no token is another, no stream is
silently short, nothing leaks, nobody waits for ever. The first that breaks one is replayed event by event."""


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    chaos = commands.add_parser(
        "chaos", help="let things go wrong, and check the laws", description=ABOUT, allow_abbrev=False
    )
    chaos.add_argument("--seeds", type=int, default=100, metavar="N", help="runs (100)")
    chaos.add_argument("--first", type=int, default=0, metavar="S", help="the first run's seed (0)")
    chaos.add_argument("--jobs", type=int, default=1, metavar="K", help="runs at a time (1)")
    chaos.add_argument(
        "--replay", type=int, metavar="SEED", help="tell one run event by event, whether it fails or not"
    )
    chaos.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from kvloom.lab.faults.chaos import chaos  # noqa: PLC0415 - --help needs none of it

    return chaos(seeds=options.seeds, first=options.first, jobs=options.jobs, replay=options.replay)
