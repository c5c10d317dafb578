"""Figures as a table and as one JSON file, with what was wanted of them and with what could not be run. A run
that was ended early is gone on with from its file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

VERSION: Final = 2


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


class Findings(Struct, kw_only=True):
    """What one part has found."""

    figures: list[Figure] = []
    failures: dict[str, str] = {}
    """By check, why it could not run or what was wrong."""
    under_way: list[str] = []
    """Checks that have begun and not ended."""
    complete: bool = False
    """Whether the part has ended and nothing was wrong, so that it need not run again."""

    def ended(self, part: str, why: str) -> Findings:
        """Returns what counts once nothing is under way any more. why: how the part's process ended, empty if
        all is well; what was under way has failed."""
        failures = self.failures | dict.fromkeys(self.under_way, why or "did not end")
        if why and not self.under_way:
            failures[part] = why
        return Findings(figures=self.figures, failures=failures, complete=not failures)


class Report(Struct, kw_only=True):
    """What all parts have found, in one run or in several that agree in their environment."""

    version: int = VERSION
    environment: dict[str, str]
    parts: dict[str, Findings] = {}
    seconds: float = 0.0
    """Those of all runs together."""

    @property
    def figures(self) -> list[Figure]:
        return [figure for part in self.parts.values() for figure in part.figures]

    @property
    def failures(self) -> dict[str, str]:
        """By part and check."""
        return {
            check if check == name else f"{name}: {check}": why
            for name, part in self.parts.items()
            for check, why in part.failures.items()
        }

    def complete(self, part: str) -> bool:
        return part in self.parts and self.parts[part].complete

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


def resumed(file: Path, found: dict[str, str], parts: Iterable[str]) -> tuple[Report, str]:
    """Returns the report of `file` if it is of the environment `found`, with its parts in the order of
    `parts`; an empty one otherwise. Returns a line for the user beside it: which parts are kept, or why none
    is. The line is empty if there is no file."""
    fresh = Report(environment=found)
    if not file.exists():
        return fresh, ""
    try:
        content = file.read_bytes()
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            return fresh, f"{file} is in format {version}, not {VERSION}: all is measured anew"
        known = msgspec.json.decode(content, type=Report)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return fresh, f"{file} cannot be read ({error}): all is measured anew"
    names = known.environment | found  # in this order
    other = [name for name in names if known.environment.get(name) != found.get(name)]
    if other:
        told = "; ".join(f"{name} {known.environment.get(name)}, now {found.get(name)}" for name in other)
        return fresh, f"{file} is of something else ({told}): all is measured anew"
    fresh.seconds = known.seconds
    fresh.parts = {
        part: known.parts[part].ended(part, "was ended early" if known.parts[part].under_way else "")
        for part in parts
        if part in known.parts
    }
    kept = [part for part in fresh.parts if fresh.complete(part)]
    return fresh, f"{file} has of this commit and device: {', '.join(kept) or 'no complete part'}"


class _Versioned(Struct):
    version: int = 1  # the first format did not say


class Checks:
    """The checks of one part, one after the other, none begun after `seconds`. What is known is in `file` at
    any time."""

    def __init__(self, seconds: float, file: Path) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._file = file
        self.findings = Findings()

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - (time.monotonic() - self._began)

    def check(self, name: str, measure: Callable[[], Iterable[Figure]]) -> None:
        """Figures count as they come. What raises is told of, and the others run."""
        if self.left < 0:
            self.findings.failures[name] = "not run: no time was left"
            write(self._file, self.findings)
            return
        print(f"-- {name} ({self.left:.0f} s left)", flush=True)
        self.findings.under_way.append(name)
        write(self._file, self.findings)
        try:
            for figure in measure():
                self.findings.figures.append(figure)
                write(self._file, self.findings)
        except Exception as error:  # noqa: BLE001 -- the others are worth having
            self.findings.failures[name] = "; ".join(reasons(error))
        self.findings.under_way.remove(name)
        write(self._file, self.findings)


def write(file: Path, content: Struct) -> None:
    """Writes the whole of it or, if the machine ends meanwhile, nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.part")
    with beside.open("wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(content), indent=2))
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)


def reasons(error: BaseException) -> Iterator[str]:
    """One line each; of a group's own nothing is said."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from reasons(one)
    else:
        yield f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
