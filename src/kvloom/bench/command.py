"""`kvloom bench`: asks a server what a workload asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

DEFAULT_URL: Final = "http://127.0.0.1:8000"
KEY_VARIABLE: Final = "KVLOOM_API_KEY"

SERVE = """\
Ask an OpenAI endpoint, kvloom's or another's, what a workload asks for: each request at its time, whatever
became of those before. Prompts are sent to /v1/completions as token ids; answers are streamed, and as long as
the workload has them. Latencies count from when a request was due."""

PAGE = "Draw the results of a benchmark or of a simulation as one HTML page, which needs nothing else."


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    bench = commands.add_parser("bench", help="measure a server under a workload", allow_abbrev=False)
    actions = bench.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_serve(actions)
    page = actions.add_parser("page", help="draw results", description=PAGE, allow_abbrev=False)
    page.add_argument("results", type=Path, metavar="RESULTS.json", help="what --json wrote")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html")
    page.set_defaults(run=run_page)


def _add_serve(actions: Any) -> None:
    serve = actions.add_parser(
        "serve", help="ask a server what a workload asks for", description=SERVE, allow_abbrev=False
    )
    serve.add_argument("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    serve.add_argument(
        "--workload", type=Path, required=True, metavar="FILE", help="a workload, a spec of one, or a trace"
    )
    serve.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="X times the workload's rate"
    )
    serve.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=REMOTE",
        help="the server's name for a model of the workload, or, without NAME=, for all others; may be given "
        "again",
    )
    serve.add_argument("--key", help=f"API key of the server (${KEY_VARIABLE})")
    serve.add_argument("--prompts", choices=("tokens", "text"), default="tokens", help="(tokens)")
    serve.add_argument("--vocab", type=int, metavar="N", help="token ids below N (the workload's)")
    serve.add_argument(
        "--plain", action="store_true", help="send OpenAI's own parameters alone: answers may end early"
    )
    serve.add_argument("--timeout", default="600s", metavar="TIME", help="of a request (600s)")
    serve.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="WHAT=TIME",
        help="count answers in time: first, per_token and end, as `--slo first=200ms --slo per_token=50ms`",
    )
    serve.add_argument(
        "--slo-scale",
        action="append",
        type=float,
        default=[],
        metavar="X",
        help="count answers within X times their latency alone, measured first; may be given again",
    )
    serve.add_argument("--json", type=Path, metavar="OUT", help="write the results")
    serve.add_argument("--html", type=Path, metavar="OUT", help="draw the results")
    serve.set_defaults(run=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    from kvloom.bench.serve import serve  # noqa: PLC0415  (--help needs none of it)

    return serve(options)


def run_page(options: argparse.Namespace) -> int:
    from kvloom.lab.workload.page import page  # noqa: PLC0415
    from kvloom.lab.workload.results import read_results, write_text  # noqa: PLC0415

    write_text(options.output, page(read_results(options.results)))
    return 0
