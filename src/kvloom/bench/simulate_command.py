"""`kvloom simulate`: what a fleet would do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from kvloom.types.spec import Policy

ABOUT = """\
Play a workload to a fleet in virtual time: kvloom's own engines, batching policies, pool and router programs,
over devices that take as long as a cost model says. FLEET is a plan (`kvloom plan`), whose devices are known
by their sheets, or a config, for this machine as `kvloom profile` has measured it."""


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    simulate = commands.add_parser(
        "simulate", help="say what a fleet would do", description=ABOUT, allow_abbrev=False
    )
    simulate.add_argument("fleet", type=Path, metavar="FLEET", help="plan.json or config.yaml")
    simulate.add_argument(
        "--workload", type=Path, required=True, metavar="FILE", help="a workload, a spec of one, or a trace"
    )
    simulate.add_argument("--profile", type=Path, metavar="FILE", help="of this machine, for a config")
    simulate.add_argument(
        "--client-here",
        action="store_true",
        help="who asks, as `kvloom bench serve` does, shares the measured machine",
    )
    simulate.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="X times the workload's rate"
    )
    simulate.add_argument("--program", metavar="P", help="router program (the config's, or least_loaded)")
    simulate.add_argument("--policy", choices=get_args(Policy), help="batching (the config's, or adbs)")
    simulate.add_argument(
        "--slo-scale",
        type=float,
        action="append",
        default=[],
        metavar="X",
        help="count answers within X times what they take alone; may be given again",
    )
    simulate.add_argument(
        "--seed", type=int, metavar="N", help="draw the order of what happens at one moment from N"
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    simulate.add_argument("--html", type=Path, metavar="FILE", help="draw the results as a page")
    simulate.set_defaults(run=run_simulate)


def run_simulate(options: argparse.Namespace) -> int:
    from kvloom.bench.simulate import simulate_command  # noqa: PLC0415 - --help needs none of it

    return simulate_command(options)
