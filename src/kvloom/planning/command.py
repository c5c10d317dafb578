"""`kvloom plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Find out which models go together on which devices, so that they answer as many requests as possible, and
what each is expected to answer (MuxServe). `kvloom serve` and `kvloom simulate` take the plan that it
writes."""

EPILOG = """\
CLUSTER.yaml:
  nodes:
    - {device: A100-80, gpus: 8, count: 4}       # A100-40, A10, L40S, H100, H200
    - {device: cpu, gpus: 16, memory: 64GiB}     # its cores; needs --profile
  models:
    chat: {shape: llama-7b, rate: 20, prompt: 161, output: 338}   # requests a second; mean tokens
    code: {path: /models/coder, rate: 2, prompt: 800, output: 250}

With --workload the rates and lengths are those of past traffic."""


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


def run(options: argparse.Namespace) -> int:
    from kvloom.planning.conduct import conduct  # noqa: PLC0415  (--help needs none of it)

    return conduct(options.cluster, options.workload, options.profile, options.baseline, options.output)
