"""`kvloom workload`: makes workload files, and shows what is in one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

MAKE = """\
Make a workload: a file with one request a line, of the models, rates, lengths and beginnings that a spec
describes, or of a trace that it names. The same spec makes the same file."""

SHOW = "Show what a workload, a spec or a trace asks for: rates, and tokens as mean: P50 / P80 / P95 / P99."


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    workload = commands.add_parser("workload", help="make or show a workload", allow_abbrev=False)
    actions = workload.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("make", help="make one", description=MAKE, allow_abbrev=False)
    make.add_argument("spec", type=Path, metavar="SPEC.yaml", help="see docs/workloads.md")
    make.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.jsonl")
    make.add_argument("--seed", type=int, metavar="N", help="instead of the spec's")
    make.set_defaults(run=run_make)
    show = actions.add_parser("show", help="show one", description=SHOW, allow_abbrev=False)
    show.add_argument("file", type=Path, metavar="FILE", help="a workload, a spec of one, or a trace")
    show.set_defaults(run=run_show)


def run_make(options: argparse.Namespace) -> int:
    from kvloom.bench.workloads import make  # noqa: PLC0415  (--help needs none of it)

    return make(options)


def run_show(options: argparse.Namespace) -> int:
    from kvloom.bench.workloads import show  # noqa: PLC0415

    return show(options)
