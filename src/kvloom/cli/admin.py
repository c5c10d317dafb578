"""`kvloom program`, `kvloom unit`, `kvloom node` and `kvloom restart`: a fleet that serves is administered
over HTTP."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, Parameter, Token

from kvloom.cli.app import DEFAULT_URL, CommandFailed, Url, interruptible, print_columns
from kvloom.cli.gateway import AdminClient, GatewayError
from kvloom.config.fields import parse_program
from kvloom.types.errors import ConfigError
from kvloom.types.numbers import show_count, show_size
from kvloom.types.service import LONGEST_DRAIN, Admit, Drain, NodeState, ProgramState, RestartStep, UnitState
from kvloom.types.spec import ProgramSpec

program = App(
    name="program",
    help="Show or change the router program of a fleet that serves.\n\n"
    "Requests in flight end under the program they began with; no engine starts again.",
)
unit = App(
    name="unit",
    help="Show units, or take one out of service and back.\n\n"
    "A unit that is drained gets no new request, and ends those it has. One that is restarted is drained "
    "first and admitted afterwards, so that no request is lost: what no other unit can answer waits for it, "
    "as long as the config's `patience` says.",
)
node = App(
    name="node",
    help="Show the nodes of a fleet of several machines, or empty one.\n\n"
    "On a node that is drained nothing starts, and its units start anew on others that have room.",
)
restart = App(name="restart")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server that a command asks, and the key that it asks with."""

    url: Url = DEFAULT_URL
    admin_key_file: Annotated[
        Path | None, Parameter(help="a file with an admin key of the server ($KVLOOM_ADMIN_KEY is one)")
    ] = None
    ca: Annotated[
        Path | None, Parameter(help="certificates of the server's authorities (the system's, $SSL_CERT_FILE)")
    ] = None
    certificate: Annotated[
        Path | None, Parameter(help="your certificate, if the server's `client_ca` wants one")
    ] = None
    key: Annotated[Path | None, Parameter(help="the certificate's key, if it is in another file")] = None

    def gateway(self) -> AdminClient:
        """Raises ConfigError if the address, the key or a certificate cannot be used."""
        return AdminClient(
            self.url, self.admin_key_file, ca=self.ca, certificate=self.certificate, key=self.key
        )

    @contextmanager
    def asked(self, shown_by: str = "") -> Iterator[AdminClient]:
        """Gives the gateway of the server, and ends the command if it refuses or is not there. After Ctrl-C
        the server goes on with what it was ordered, which the command `shown_by` then shows."""
        gateway = self.gateway()
        try:
            if not shown_by:
                yield gateway
                return
            with interruptible(f"the server goes on with it, which `kvloom {shown_by}` shows"):
                yield gateway
        except GatewayError as error:
            raise CommandFailed(str(error)) from error


def _read_seconds(_: type, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= LONGEST_DRAIN:
            return seconds
    raise ConfigError(
        f"{tokens[0].keyword or '--seconds'}: {text[:40]!r}; seconds from 0 to {LONGEST_DRAIN} are right"
    )


HERE: Final = ServerOptions()
UnitName = Annotated[str, Parameter(help="the unit, as `kvloom unit list` shows it")]
Seconds = Annotated[
    float | None,
    Parameter(converter=_read_seconds, help="how long to wait at a unit (the config's `drain`)"),
]
DrainSeconds = Annotated[
    float | None,
    Parameter(
        converter=_read_seconds,
        metavar="SECONDS",
        help="how long its requests may end (the config's `drain`)",
    ),
]


@program.command(name="set")
def set_program(
    name: Annotated[str, Parameter(help="a program that comes with kvloom, or module:function")],
    /,
    *,
    option: Annotated[
        tuple[str, ...],
        Parameter(metavar="KEY=VALUE", help="an option of the program, as ratio=0.2; may be given again"),
    ] = (),
    server: ServerOptions = HERE,
) -> None:
    """Change the program, from the next request on."""
    wanted = read_program(name, option)
    with server.asked("program show") as gateway:
        print(show_program(gateway.set_program(wanted)))


@program.command(name="show")
def print_program(*, server: ServerOptions = HERE) -> None:
    """Show the program, as it would be typed after `kvloom program set`.

    If it is on probation, or another one that was set has failed, that is told on stderr."""
    with server.asked() as gateway:
        state = gateway.program()
    print(show_program(state))
    if state.probation:
        print("It was set less than a minute ago, and is on probation.", file=sys.stderr)
    if (reverted := state.reverted) is not None:
        named = "the config's" if reverted.program is None else show_program(reverted.program)
        print(f"{named} was set before, and the gateway {reverted.problem}.", file=sys.stderr)


def read_program(name: str, texts: Sequence[str]) -> ProgramSpec:
    """Returns a program by its name and its options, KEY=VALUE each; a value that is no JSON is a text.
    Raises ConfigError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals) or key == "name":
            raise ConfigError(f"--option {text}: KEY=VALUE is right, as `ratio=0.2`")
        if key in settings:
            raise ConfigError(f"--option {key}: given twice")
        settings[key] = _read_value(value)
    try:
        return parse_program({"name": name, **settings})
    except ValueError as error:
        raise ConfigError(f"program: {error}") from error


def show_program(spec: ProgramSpec | ProgramState) -> str:
    """Returns the program as it would be typed after `kvloom program set`."""
    options = [
        "--option " + shlex.quote(f"{key}={_write_value(value)}") for key, value in spec.options.items()
    ]
    return " ".join([spec.name, *options])


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write_value(value: object) -> str:
    return value if isinstance(value, str) and _read_value(value) == value else json.dumps(value)


@unit.command(name="list")
def list_units(*, server: ServerOptions = HERE) -> None:
    """Show all units."""
    with server.asked() as gateway:
        print_units(gateway.units())


@unit.command
def drain(name: UnitName, /, *, seconds: Seconds = None, server: ServerOptions = HERE) -> None:
    """Give a unit no new request, and wait for those it has."""
    with server.asked("unit list") as gateway:
        print_units([gateway.order(name, "drain", Drain(seconds=seconds))])


@unit.command
def admit(name: UnitName, /, *, server: ServerOptions = HERE) -> None:
    """Let a unit have requests again."""
    with server.asked("unit list") as gateway:
        print_units([gateway.order(name, "admit", Admit())])


@unit.command(name="restart")
def restart_unit(name: UnitName, /, *, seconds: Seconds = None, server: ServerOptions = HERE) -> None:
    """Drain a unit, put a new process in its place, and admit that."""
    with server.asked("unit list") as gateway:
        print_units([gateway.order(name, "restart", Drain(seconds=seconds))])


@unit.command
def start(name: UnitName, /, *, server: ServerOptions = HERE) -> None:
    """Give a unit a process, if it has none."""
    with server.asked("unit list") as gateway:
        print_units([gateway.order(name, "start", Admit())])


@unit.command
def stop(name: UnitName, /, *, seconds: Seconds = None, server: ServerOptions = HERE) -> None:
    """Drain a unit, and end its process: requests that only it can answer wait."""
    with server.asked("unit list") as gateway:
        print_units([gateway.order(name, "stop", Drain(seconds=seconds))])


def print_units(states: Sequence[UnitState]) -> None:
    """Prints a line for each: its name, state, calls, models, and what is wrong, if anything."""
    print_columns(
        (
            state.name,
            state.state,
            show_count(state.calls, "call"),
            ", ".join(state.models) + (f" ({state.problem})" if state.problem else ""),
        )
        for state in states
    )


NodeName = Annotated[str, Parameter(help="the node, as `kvloom node list` shows it")]


@node.command(name="list")
def list_nodes(*, server: ServerOptions = HERE) -> None:
    """Show all nodes, and what runs there."""
    with server.asked() as gateway:
        print_nodes(gateway.nodes())


@node.command(name="drain")
def drain_node(name: NodeName, /, *, seconds: Seconds = None, server: ServerOptions = HERE) -> None:
    """Have everything on a node start elsewhere, and wait until it is empty."""
    with server.asked("node list") as gateway:
        print_nodes([gateway.order_node(name, "drain", Drain(seconds=seconds))])


@node.command(name="admit")
def admit_node(name: NodeName, /, *, server: ServerOptions = HERE) -> None:
    """Let units start on a node again."""
    with server.asked("node list") as gateway:
        print_nodes([gateway.order_node(name, "admit", Admit())])


def print_nodes(states: Sequence[NodeState]) -> None:
    """Prints a line for each: its name, state, address, room, what runs there, and what is wrong."""
    print_columns(
        (
            state.name,
            state.state,
            state.address or "-",
            f"{state.cores} cores" + (f", {state.gpus} GPUs" if state.gpus else ""),
            f"{show_size(max(state.left, 0))} of {show_size(state.memory)} free",
            (", ".join(state.components) or "-") + (f" ({state.problem})" if state.problem else ""),
        )
        for state in states
    )


@restart.default
def restart_all(
    *,
    rolling: Annotated[bool, Parameter(help="one component after the other")],
    seconds: Seconds = None,
    server: ServerOptions = HERE,
) -> int:
    """Restart every component of a fleet while it serves.

    Each unit is drained, its requests moving to others that serve their models, and gets a new process; then
    the fleet scheduler, and at last the gateway, the old one of which serves its streams to their end. No
    request is lost: what no other unit can answer waits."""
    state = ""
    with server.asked("unit list") as gateway:
        for step in gateway.restart_all(seconds):
            state = step.state
            print(show_step(step), flush=True)
    return 1 if state == "failed" else 0


def show_step(step: RestartStep) -> str:
    """Returns one line on a step of a rolling restart."""
    took = "" if step.seconds is None else f" in {step.seconds:.1f} s"
    return f"{step.component:<9}  {step.state}{took}" + (f": {step.problem}" if step.problem else "")
