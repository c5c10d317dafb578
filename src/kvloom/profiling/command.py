"""`kvloom profile`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

from kvloom.types.errors import ConfigError

INTERRUPTED: Final = 130

DESCRIPTION: Final = """\
Measure how long this machine takes for the jobs of some models: prefills and decode steps of many sizes, on
each share of the cores, alone, two at a time and beside other work; the engine's own work between steps; and
what the server does besides, for which it is started and asked. That takes some minutes for each model, in
which the machine should do nothing else.

With neither CONFIG nor --model it measures the demo fleet. A simulation takes the models' costs from the
profile that it writes."""


def add(commands: Any) -> None:
    """The command to the parser's `commands`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="measure how long this machine takes for models' jobs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="as for `kvloom serve`")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH_OR_HUB_ID",
        help="a model to measure, and its name; may be given again",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PROFILE.json", help="the file to write"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of what is drawn; 0 is greedy (0)"
    )
    parser.add_argument("--quick", action="store_true", help="about half a minute; its numbers are rough")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from kvloom.config_file import load_config, parse_models  # noqa: PLC0415  (--help needs none of it)
    from kvloom.machine import Machine  # noqa: PLC0415

    if not 0.0 <= options.temperature <= 100.0:
        raise ConfigError(f"--temperature: {options.temperature}; 0 to 100 is right")
    require_writable(options.output)
    config = load_config(options.config, {}, parse_models(options.model), Machine.here())
    try:
        from kvloom.profiling.conduct import conduct  # noqa: PLC0415  (with torch)

        conduct(
            config,
            options.output,
            temperature=options.temperature,
            quick=options.quick,
            arguments=serve_arguments(options),
        )
    except KeyboardInterrupt:
        print("kvloom: interrupted; no profile is written", file=sys.stderr)
        return INTERRUPTED
    return 0


def serve_arguments(options: argparse.Namespace) -> list[str]:
    """By which `kvloom serve` serves the same."""
    models = [word for model in options.model for word in ("--model", model)]
    return [*([str(options.config)] if options.config else []), *models]


def require_writable(file: Path) -> None:
    """Before minutes are spent. Raises ConfigError."""
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is a folder" if file.is_dir() else f"cannot be written in {folder}"
        raise ConfigError(f"--output: {file} {what}; a file in a folder of yours is right")
