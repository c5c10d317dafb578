"""The command `kvloom doctor`, which runs all checks and prints a line for each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from kvloom.cli.app import FAILED, print_columns
from kvloom.cli.doctor import hardware, software
from kvloom.cli.doctor.finding import Finding
from kvloom.config.machine import Machine

app = App(name="doctor")


@app.default
def doctor(*, json: Annotated[bool, Parameter(help="print the findings as JSON")] = False) -> int:
    """Say what this machine has for kvloom, and what it lacks.

    Each line tells what was looked at, what was found, whether that is ok, worth a note, or a problem, and
    what would be right. The exit code is 1 if something is a problem. It takes some seconds, because torch is
    imported in a process of its own."""
    found = list(_findings())
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        print_columns(
            (one.verdict, one.what, one.found + (f"; right is: {one.right}" if one.right else ""))
            for one in found
        )
    return FAILED if any(one.verdict == "problem" for one in found) else 0


def _findings() -> Iterator[Finding]:
    machine, processor = Machine.here(), software.ask_processor()
    yield software.check_python()
    yield from software.check_packages()
    yield from software.check_torch(processor, machine.gpus)
    yield from hardware.check_cores(machine)
    yield from hardware.check_memory(machine)
    yield from hardware.check_limits()
    yield from hardware.check_folders()
    yield hardware.check_port()
    yield hardware.check_gpus(machine, processor)
    yield from software.check_triton(machine.gpus)
