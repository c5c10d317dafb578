"""Figures as a table and as one JSON file, with what could not be run."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

_PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "numpy", "kvloom")


class Figure(Struct, frozen=True, kw_only=True):
    """bound: what the device allows, measured in the same run, in the same unit; None where there is none."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    note: str = ""

    def row(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:,.4g}"
        return f"{self.name:<58}{self.value:>12,.4g} {self.unit:<9}{bound:>12}  {self.note}"


class Report(Struct, kw_only=True):
    """failures: by check, why it could not run or what was wrong."""

    environment: dict[str, str]
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    def table(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.environment.items()]
        lines += ["", f"{'':<58}{'found':>12} {'':<9}{'the device':>12}"]
        lines += [figure.row() for figure in self.figures]
        lines += [f"NOT RUN, OR WRONG: {name}: {why}" for name, why in self.failures.items()]
        return "\n".join([*lines, "", f"{self.seconds:.0f} s in all"])


class Run:
    """Checks one after the other, none begun after `seconds`. What is known is in `file` after each."""

    def __init__(self, seconds: float, file: Path) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._file = file
        self._under_way: list[str] = []
        self.report = Report(environment=environment())

    @contextmanager
    def bounded(self, seconds: float, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """While in it: so many seconds from now the process ends, whatever it waits for."""
        timer = threading.Timer(seconds, self.give_up, (end,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def give_up(self, end: Callable[[int], object]) -> None:
        """What is under way does not end: a device that hangs cannot be asked to stop."""
        for name in self._under_way:
            self.report.failures[name] = "did not end"
        self.close()
        end(1)

    def close(self) -> None:
        """Write all down, and print it."""
        self.report.seconds = time.monotonic() - self._began
        self.report.write(self._file)
        print(f"\n{self.report.table()}\nwritten to {self._file}", flush=True)

    def check(self, name: str, measure: Callable[[], list[Figure]]) -> None:
        """What raises is told of, and the others run."""
        left = self._seconds - (time.monotonic() - self._began)
        if left < 0:
            self.report.failures[name] = "not run: the time for all checks is over"
        else:
            print(f"-- {name} ({left:.0f} s left)", flush=True)
            self._under_way.append(name)
            try:
                self.report.figures += measure()
            except Exception as error:  # noqa: BLE001 -- the others are worth having
                self.report.failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._under_way.remove(name)
        self.report.seconds = time.monotonic() - self._began
        self.report.write(self._file)


def environment() -> dict[str, str]:
    found: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["memory"] = f"{properties.total_memory:,} bytes"
        found["driver"] = _driver()
        found["CUDA of torch"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {name: str(value) for name, value in found.items()}


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return " ".join(file.read_text().splitlines()[0].split()) if file.is_file() else "unknown"
