"""`kvloom model`, `kvloom config` and `kvloom quantize`: a fleet that serves gets other models, or another
config, and a checkpoint fewer bits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from kvloom.cli.admin import HERE, DrainSeconds, ServerOptions
from kvloom.cli.app import CommandFailed, interruptible, print_columns
from kvloom.cluster.models import ModelState, Wanted
from kvloom.config.fields import check_revision, check_sha256
from kvloom.config.file import load_config
from kvloom.config.machine import Machine
from kvloom.config.models import check_name, resolve_model
from kvloom.plan.plan import checkpoint_bytes
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec

_SHOWN_BY: Final = "model list"
_AS_WANTED: Final = "units, models and program are as the config says"

model = App(
    name="model",
    help="Show the models of a fleet, or add or remove one while it serves.\n\n"
    "A unit that gets or loses a model is drained and restarted with its new models, so that no request is "
    "lost: what no other unit can answer waits for it, as long as the config's `patience` says.",
)
config = App(name="config", help="Bring a fleet that serves to another config.")
quantize = App(name="quantize")


@model.command
def add(
    named: Annotated[
        str,
        Parameter(
            name="NAME=PATH", help="the name for the model, and its checkpoint's folder, GGUF file or hub id"
        ),
    ],
    /,
    *,
    unit: Annotated[
        str | None, Parameter(help="the unit that is to serve it (the one whose models have the most room)")
    ] = None,
    revision: Annotated[str | None, Parameter(help="a hub id's commit, tag or branch")] = None,
    sha256: Annotated[
        str | None, Parameter(help="the digest that the weights must have, by `kvloom model digest`")
    ] = None,
    server: ServerOptions = HERE,
) -> None:
    """Serve another model, and wait until its unit does. A unit that cannot start with it goes back to
    what it served."""
    wanted = read_model(named, revision, sha256)
    with server.asked(_SHOWN_BY) as gateway:
        print_models([gateway.add_model(wanted, unit)])


@model.command
def remove(
    name: Annotated[str, Parameter(help="the model, as `kvloom model list` shows it")],
    /,
    *,
    drain: DrainSeconds = None,
    server: ServerOptions = HERE,
) -> None:
    """Serve a model no more, once its requests have ended. A unit that would serve nothing is removed."""
    with server.asked(_SHOWN_BY) as gateway:
        gateway.remove_model(name, drain)
        print_models(gateway.models())


@model.command(name="list")
def list_models(*, server: ServerOptions = HERE) -> None:
    """Show all models, their checkpoints, and the state of each unit that serves them."""
    with server.asked() as gateway:
        print_models(gateway.models())


@model.command
def digest(
    path: Annotated[str, Parameter(name="PATH", help="a checkpoint's folder, a GGUF file, or a hub id")],
    /,
    *,
    revision: Annotated[str | None, Parameter(help="the hub id's commit, tag or branch")] = None,
) -> None:
    """Print the digest of a checkpoint's weights, as a model's `sha256` in a config wants it. It reads all
    weights, and downloads those of a hub id that are not in the hub's cache."""
    from kvloom.exec.checkpoint import open_checkpoint  # noqa: PLC0415 -- no other command reads checkpoints

    try:
        found = resolve_model(path, Path.cwd())
        print(open_checkpoint(found, check_revision(revision, found)).digest(), flush=True)
    except Exception as error:  # also whatever the hub's client or the files' disk makes of it
        raise ConfigError(f"{path[:140]}: {' '.join(str(error).split())[:400]}") from error


@quantize.default
def make_quantized(
    path: Annotated[str, Parameter(name="PATH", help="a checkpoint's folder, or a hub id")],
    /,
    *,
    to: Annotated[Literal["int8", "int4"], Parameter(help="the format of the new weights")],
    output: Annotated[Path, Parameter(alias="-o", help="the folder to make")],
    revision: Annotated[str | None, Parameter(help="the hub id's commit, tag or branch")] = None,
) -> None:
    """Make a checkpoint of 8 or 4 bits from another.

    The linear modules of the decoder's layers become integers with a scale for each 32 neighbours in a row;
    its embedding, norms and head stay as they are. The new checkpoint is in the compressed-tensors format."""
    from kvloom.exec.quantize import quantize_checkpoint  # noqa: PLC0415 -- no other command needs torch

    def progress(line: str) -> None:
        print(line, flush=True)

    with interruptible(f"{output} is not made"):
        try:
            found = resolve_model(path, Path.cwd())
            bits: Literal[8, 4] = 8 if to == "int8" else 4
            quantize_checkpoint(found, check_revision(revision, found), output, bits, progress)
        except Exception as error:  # also whatever the hub's client, transformers or the disk makes of it
            raise ConfigError(f"{path[:140]}: {' '.join(str(error).split())[:400]}") from error
    print(f"done: {output}")


def read_model(text: str, revision: str | None = None, sha256: str | None = None) -> ModelSpec:
    """Reads NAME=PATH, whose path counts from the working folder, and what pins it. Raises ConfigError."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"{text[:140]}: NAME=PATH_OR_HUB_ID is right, as `chat=Qwen/Qwen3-0.6B`")
    try:
        check_name(name)
        found = resolve_model(path, Path.cwd())
        return ModelSpec(
            name=name,
            path=found,
            revision=check_revision(revision, found),
            sha256=check_sha256(sha256),
            memory=checkpoint_bytes(found),
        )
    except ValueError as error:
        raise ConfigError(f"{name[:140]}: {error}") from error


def print_models(states: Sequence[ModelState]) -> None:
    """Prints a line for each model: its name, its units with their states, and its checkpoint."""
    print_columns(
        (state.name, ", ".join(f"{unit} {stands}" for unit, stands in state.units.items()), state.path)
        for state in states
    )


@config.command
def apply(
    file: Annotated[Path, Parameter(help="a config of `kvloom serve`, or a plan")],
    /,
    *,
    yes: Annotated[bool, Parameter(help="do it without asking")] = False,
    server: ServerOptions = HERE,
) -> None:
    """Bring a fleet that serves to another config.

    It shows which units are added, start anew and are removed, and what else changes. With --yes, or once you
    have said so, it does it while the fleet serves: units are added first, then the others are drained and
    restarted one after the other, and at last those are removed that the config does not have. Everything
    but units, models and program stays as it was when the fleet was started, and a line says which such keys
    the config sets."""
    with server.asked() as gateway:
        fleet = gateway.placement()  # with what its machine had when the fleet was started
        nodes = tuple(node.name for node in gateway.nodes())
        machine = replace(Machine.here(), cores=fleet.cores, memory=fleet.memory, nodes=nodes)
        read = load_config(file, {}, {}, machine)
        wanted = Wanted(
            engines=read.engines, first=read.first, groups=dict(read.groups), program=read.program
        )
        changes = gateway.apply(wanted, really=False).changes
    for line in changes or (_AS_WANTED,):
        print(line, flush=True)
    if read.kept_from_start:
        print(f"not applied, needs a new start if it has changed: {', '.join(read.kept_from_start)}")
    if not changes:
        return
    if not yes and not _agreed():
        print("nothing is changed yet; --yes does it")
        return
    with server.asked("unit list") as gateway:
        applied = gateway.apply(wanted, really=True)
    for field in applied.overrode:
        print(f"{field}: somebody else has changed it meanwhile; the config's value is taken")
    if applied.problems:
        raise CommandFailed("; ".join(applied.problems))
    print(f"done: {_AS_WANTED}")


def _agreed() -> bool:
    """Asks the person at the terminal, if there is one."""
    if not sys.stdin.isatty():
        return False
    try:
        return input("Do it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
