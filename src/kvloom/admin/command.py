"""`kvloom program`, `kvloom unit` and `kvloom restart`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvloom.types.service import LONGEST_DRAIN, RestartStep, UnitState

SERVER_ERROR: Final = 1
INTERRUPTED: Final = 130
_LOOKS: Final = ("list", "show")  # that change nothing
DEFAULT_URL: Final = "http://127.0.0.1:8000"

PROGRAM = """\
Show or change the router program of a fleet that serves. Requests in flight end under the program they began
with; no engine starts again."""

UNIT = """\
Show units, or take one out of service and back. A unit that is drained gets no new request, and ends those it
has; one that is restarted is drained first and admitted afterwards, so that no request is lost: what no other
unit can answer waits for it, as long as the config's `patience` says."""

RESTART = """\
Restart every component of a fleet while it serves: each unit is drained, its requests moving to others that
serve their models, and gets a new process; then the fleet scheduler, and at last the gateway, the old one of
which serves its streams to their end. No request is lost: what no other unit can answer waits."""


def add(commands: Any) -> None:
    """commands: where argparse takes subcommands."""
    _add_program(commands)
    _add_unit(commands)
    _add_restart(commands)


def _add_program(commands: Any) -> None:
    program = commands.add_parser(
        "program", help="show or change the router program", description=PROGRAM, allow_abbrev=False
    )
    actions = program.add_subparsers(dest="action", metavar="ACTION", required=True)
    change = actions.add_parser("set", help="change it", description=PROGRAM, allow_abbrev=False)
    change.add_argument("name", metavar="NAME", help="a program that comes with kvloom, or module:function")
    change.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the program, as ratio=0.2; may be given again",
    )
    show = actions.add_parser("show", help="show it", description=PROGRAM, allow_abbrev=False)
    for action in (change, show):
        add_server(action, run_program)


def _add_unit(commands: Any) -> None:
    unit = commands.add_parser(
        "unit", help="show units, drain or restart one", description=UNIT, allow_abbrev=False
    )
    actions = unit.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, said in (
        ("list", "show all"),
        ("drain", "give it no new request, and wait for those it has"),
        ("admit", "let it have requests again"),
        ("restart", "drain it, put a new process in its place, admit that"),
        ("start", "give it a process, where it has none"),
        ("stop", "drain it, and end its process: requests that only it can answer wait"),
    ):
        parser = actions.add_parser(action, help=said, description=UNIT, allow_abbrev=False)
        if action != "list":
            parser.add_argument("name", metavar="NAME", help="of the unit, as `kvloom unit list` shows it")
        if action in ("drain", "restart", "stop"):
            parser.add_argument(
                "--seconds",
                type=_seconds,
                metavar="S",
                help="how long to wait (what the config's `drain` says)",
            )
        add_server(parser, run_unit)


def _add_restart(commands: Any) -> None:
    restart = commands.add_parser(
        "restart", help="restart a whole fleet while it serves", description=RESTART, allow_abbrev=False
    )
    restart.add_argument(
        "--rolling", action="store_true", required=True, help="one component after the other"
    )
    restart.add_argument(
        "--seconds", type=_seconds, metavar="S", help="how long to wait at each unit (the config's `drain`)"
    )
    add_server(restart, run_restart)


def add_server(parser: Any, run: Any) -> None:
    """Where the server is, and who asks."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="F",
        help="the server's admin keys, one a line ($KVLOOM_ADMIN_KEY is one)",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    """Of a drain."""
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= LONGEST_DRAIN:
            return seconds
    raise argparse.ArgumentTypeError(f"{text[:40]!r}; seconds from 0 to {LONGEST_DRAIN} are right")


def run_program(options: argparse.Namespace) -> int:
    from kvloom.admin import gateway, program_text  # noqa: PLC0415  (--help needs none of it)

    server = gateway.Gateway(options.url, options.admin_key_file)
    order = None if options.action == "show" else program_text.read_options(options.name, options.option)
    try:
        found = server.program() if order is None else server.set_program(order)
    except gateway.ServerError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _interrupted(options.action, "program show")
    print(program_text.show(found))
    return 0


def run_unit(options: argparse.Namespace) -> int:
    from kvloom.admin import gateway  # noqa: PLC0415  (--help needs none of it)

    server = gateway.Gateway(options.url, options.admin_key_file)
    try:
        match options.action:
            case "list":
                found = server.units()
            case "admit":
                found = [server.admit(options.name)]
            case "drain":
                found = [server.drain(options.name, options.seconds)]
            case "start":
                found = [server.start(options.name)]
            case "stop":
                found = [server.stop(options.name, options.seconds)]
            case _:
                found = [server.restart(options.name, options.seconds)]
    except gateway.ServerError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _interrupted(options.action, "unit list")
    for line in show_units(found):
        print(line)
    return 0


def run_restart(options: argparse.Namespace) -> int:
    from kvloom.admin import gateway  # noqa: PLC0415  (--help needs none of it)

    server, state = gateway.Gateway(options.url, options.admin_key_file), ""
    try:
        for step in server.restart_all(options.seconds):
            state = step.state
            print(show_step(step), flush=True)
    except gateway.ServerError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _interrupted("restart", "unit list")
    return SERVER_ERROR if state == "failed" else 0


def show_step(step: RestartStep) -> str:
    """One line."""
    took = "" if step.seconds is None else f" in {step.seconds:.1f} s"
    return f"{step.component:<9}  {step.state}{took}" + (f": {step.problem}" if step.problem else "")


def show_units(states: Sequence[UnitState]) -> list[str]:
    """A line each: name, state, calls, models, and what is wrong, if anything."""
    cells = [
        (
            state.name,
            state.state,
            f"{state.calls} call{'' if state.calls == 1 else 's'}",
            ", ".join(state.models) + (f" ({state.problem})" if state.problem else ""),
        )
        for state in states
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _interrupted(action: str, shows: str) -> int:
    """What the server was ordered it does whoever waits. shows: the command that tells how far it is."""
    goes_on = f"; the server goes on with it, which `kvloom {shows}` shows" if action not in _LOOKS else ""
    print(f"kvloom: interrupted{goes_on}", file=sys.stderr)
    return INTERRUPTED


def _fail(error: Exception) -> int:
    print(f"kvloom: {error}", file=sys.stderr)
    return SERVER_ERROR
