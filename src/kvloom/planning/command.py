"""`kvloom plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvloom.admin.command import add_server

DESCRIPTION = """\
Find out which models go together on which devices, so that they answer as many requests as possible, and
what each is expected to answer (MuxServe). `kvloom simulate` takes the plan that it writes where that is
for GPUs, and `kvloom serve` where it is for this machine's cores."""

EPILOG = """\
CLUSTER.yaml:
  nodes:
    - {device: A100-80, gpus: 8, count: 4}       # A100-40, A10, L40S, H100, H200
    - {device: cpu, gpus: 16, memory: 64GiB}     # its cores; needs --profile
  models:
    chat: {shape: llama-7b, rate: 20, prompt: 161, output: 338}   # requests a second; mean tokens
    code: {path: /models/coder, rate: 2, prompt: 800, output: 250}

With --workload the rates and lengths are those of past traffic."""


REPLAN = """\
Show which units must be started and stopped so that a fleet which serves becomes as a plan says, and with
--apply do it, one step at a time, while it serves: requests move on to the new units, or wait where there is
no room for old and new beside each other."""


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    plan = commands.add_parser(
        "plan",
        help="find out which models go together on which devices",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument("cluster", type=Path, metavar="CLUSTER.yaml", help="see below")
    plan.add_argument(
        "--workload", type=Path, metavar="FILE", help="past traffic: a workload, a spec of one, or a trace"
    )
    plan.add_argument(
        "--profile", type=Path, metavar="FILE", help="what `kvloom profile` measured, for device cpu"
    )
    plan.add_argument(
        "--baseline",
        choices=("spatial", "memory"),
        help="instead: a mesh for each model, or placement by free memory",
    )
    plan.add_argument("-o", "--output", type=Path, metavar="PLAN.json", help="the file to write")
    plan.set_defaults(run=run)
    _add_replan(commands)


def _add_replan(commands: Any) -> None:
    replan = commands.add_parser(
        "replan", help="bring a fleet that serves to another plan", description=REPLAN, allow_abbrev=False
    )
    replan.add_argument("plan", type=Path, metavar="PLAN.json", help="what `kvloom plan -o` wrote")
    replan.add_argument("--apply", action="store_true", help="do it; left out, it is only shown")
    add_server(replan, run_replan)


def run(options: argparse.Namespace) -> int:
    from kvloom.planning.conduct import conduct  # noqa: PLC0415  (--help needs none of it)

    return conduct(options.cluster, options.workload, options.profile, options.baseline, options.output)


def run_replan(options: argparse.Namespace) -> int:
    from kvloom.admin.gateway import Gateway  # noqa: PLC0415  (--help needs none of it)
    from kvloom.planning.replan import replan  # noqa: PLC0415

    return replan(options.plan, Gateway(options.url, options.admin_key_file), apply=options.apply)
