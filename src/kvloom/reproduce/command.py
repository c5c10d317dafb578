"""`kvloom reproduce`: a paper's experiments, in virtual time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

ABOUT = """\
Run the experiments of a paper in virtual time, with kvloom's own engines, policies, pools and router
programs, and print what the paper found beside what is found here. No GPU is needed."""

PAPERS: Final = ("llumnix", "microserving", "muxserve", "weaver")


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    reproduce = commands.add_parser(
        "reproduce", help="run a paper's experiments", description=ABOUT, allow_abbrev=False
    )
    reproduce.add_argument("paper", choices=PAPERS, metavar="PAPER", help=", ".join(PAPERS))
    reproduce.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="N",
        help="only this figure, table-N or section-N; may be given again",
    )
    reproduce.add_argument(
        "--scale", choices=("small", "full"), default="full", help="small is for a quick look (full)"
    )
    reproduce.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    reproduce.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables for a page")
    reproduce.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from kvloom.reproduce.conduct import conduct  # noqa: PLC0415  (--help needs none of it)

    return conduct(options.paper, options.figure, options.scale, options.json, options.markdown)
