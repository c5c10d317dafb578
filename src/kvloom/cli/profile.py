"""`kvloom profile`: what the jobs of some models cost on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvloom.cli.app import Models, Output, interruptible
from kvloom.config.file import load_config, parse_models
from kvloom.config.machine import Machine
from kvloom.types.errors import ConfigError

app = App(name="profile")


@app.default
def profile(
    config: Annotated[Path | None, Parameter(help="as for `kvloom serve`")] = None,
    /,
    *,
    model: Models = (),
    output: Output,
    temperature: Annotated[float, Parameter(help="of what is drawn; 0 is greedy")] = 0.0,
    quick: Annotated[bool, Parameter(help="about half a minute; its numbers are rough")] = False,
) -> None:
    """Measure how long this machine takes for the jobs of some models.

    The jobs are prefills and decode steps of many sizes, on each share of the cores, alone, two at a time and
    beside other work. Measured too are the engine's own work between steps, and what the server does besides,
    for which it is started and asked. That takes some minutes for each model, in which the machine should do
    nothing else.

    With neither CONFIG nor --model it measures the demo fleet. A simulation takes the models' costs from the
    profile that it writes."""
    if not 0.0 <= temperature <= 100.0:
        raise ConfigError(f"--temperature: {temperature}; 0 to 100 is right")
    require_writable(output)
    loaded = load_config(config, {}, parse_models(model), Machine.here())
    with interruptible("no profile is written"):
        from kvloom.lab.profile.run import run_profile  # noqa: PLC0415  (with torch, unlike the rest of cli)

        run_profile(
            loaded, output, temperature=temperature, quick=quick, arguments=serve_arguments(config, model)
        )


def serve_arguments(config: Path | None, models: Sequence[str]) -> list[str]:
    """Returns the arguments by which `kvloom serve` serves the same."""
    named = [word for model in models for word in ("--model", model)]
    return [*([str(config)] if config else []), *named]


def require_writable(file: Path) -> None:
    """Raises ConfigError if the file cannot be written, before minutes are spent."""
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is a folder" if file.is_dir() else f"cannot be written in {folder}"
        raise ConfigError(f"--output: {file} {what}; a file in a folder of yours is right")
