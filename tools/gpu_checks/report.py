"""Figures as a table and as one JSON file, with what was wanted of them and with what could not be run."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from tools.gpu_checks.sessions import Sessions

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "cuda-bindings",
    "numpy",
    "kvloom",
    "flash_attn_3",
    "sglang-kernel",
)


class Figure(Struct, frozen=True, kw_only=True):
    """bound: what the device allows, measured in the same run, in the same unit; None where there is none.
    least, most: what is wanted of the value."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    note: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool | None:
        """None where nothing is wanted."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    @property
    def wanted(self) -> str:
        bars = (("≥", self.least), ("≤", self.most))
        return " ".join(f"{sign} {bar:,.4g}" for sign, bar in bars if bar is not None)

    def row(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:,.4g}"
        verdict = {None: "", True: "reached", False: "MISSED"}[self.reached]
        value = f"{self.value:,.4g} {self.unit}"
        return f"{self.name:<66}{value:>20}{bound:>12}{self.wanted:>12}  {verdict:<9}{self.note}".rstrip()


class Report(Struct, kw_only=True):
    """failures: by check, why it could not run or what was wrong. under_way: checks that have begun and not
    ended."""

    environment: dict[str, str]
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    under_way: list[str] = []
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
        part.replace(path)

    def take(self, other: Report, name: str, why: str) -> None:
        """What another process has found of the part `name`. why: how that process ended, empty where all is
        well; what it was at then has failed."""
        self.figures += other.figures
        failures = other.failures | dict.fromkeys(other.under_way, why or "did not end")
        if why and not other.under_way:
            failures["its process"] = why
        self.failures |= {f"{name}: {check}": told for check, told in failures.items()}

    def figure(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)

    def table(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.environment.items()]
        lines += ["", f"{'':<66}{'found':>20}{'the device':>12}{'wanted':>12}"]
        lines += [figure.row() for figure in self.figures]
        lines += [f"NOT RUN, OR WRONG: {name}: {why}" for name, why in self.failures.items()]
        return "\n".join([*lines, "", self._verdict(), f"{self.seconds:.0f} s in all"])

    def _verdict(self) -> str:
        verdicts = [figure.reached for figure in self.figures if figure.reached is not None]
        told = f"of {len(verdicts)} figures that were measured and of which something is wanted"
        return f"{told}, {sum(verdicts)} reach it, {len(verdicts) - sum(verdicts)} do not"


class Run:
    """Checks one after the other, none begun after `seconds`. What is known is in `file` at any time.
    sessions: that the checks have begun, which end with it."""

    def __init__(self, seconds: float, file: Path) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._file = file
        self.sessions = Sessions()
        self.report = Report(environment=environment())

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - (time.monotonic() - self._began)

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
        self.sessions.kill()
        for name in self.report.under_way:
            self.report.failures[name] = "did not end"
        self.report.under_way = []
        self.close()
        end(1)

    def close(self) -> None:
        """Write all down, and print it."""
        self._write()
        print(f"\n{self.report.table()}\nwritten to {self._file}", flush=True)

    def check(self, name: str, measure: Callable[[], Iterable[Figure]], needs: float = 0.0) -> None:
        """Figures count as they come. What raises is told of, and the others run. needs: seconds, without
        which it is not begun."""
        left = self.left
        if left < max(needs, 0.0):
            self.report.failures[name] = f"not run: {max(left, 0):.0f} s were left, and it needs {needs:.0f}"
            self._write()
            return
        print(f"-- {name} ({left:.0f} s left)", flush=True)
        self.report.under_way.append(name)
        self._write()
        try:
            for figure in measure():
                self.report.figures.append(figure)
                self._write()
        except Exception as error:  # noqa: BLE001 -- the others are worth having
            self.report.failures[name] = "; ".join(reasons(error))
        self.report.under_way = [other for other in self.report.under_way if other != name]
        self._write()

    def _write(self) -> None:
        self.report.seconds = time.monotonic() - self._began
        self.report.write(self._file)


def reasons(error: BaseException) -> Iterator[str]:
    """One line each; of a group's own nothing is said."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from reasons(one)
    else:
        yield f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
