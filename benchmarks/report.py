"""What a benchmark found: a table, and findings held against what the project must reach."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.places import BENCH

Cell = str | int | float | None
_PACKAGES = ("kvloom", "torch", "transformers", "numba", "numpy", "aiohttp", "uvicorn")


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number that counts. least, most: what it must reach, where it must."""

    what: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def target(self) -> str:
        if self.least is not None:
            return f"≥ {self.least:g}{self.unit}"
        return "" if self.most is None else f"≤ {self.most:g}{self.unit}"

    @property
    def verdict(self) -> str:
        if self.least is None and self.most is None:
            return ""
        low = self.least is not None and not self.value >= self.least
        high = self.most is not None and not self.value <= self.most
        return "missed" if low or high else "reached"


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    load_before: float
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in it comes from one run. raw: whatever else is worth keeping."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    findings: list[Finding]
    machine: Machine
    notes: list[str] = []
    raw: dict[str, object] = {}

    def save(self, folder: Path = BENCH) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        return path

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*[_text(cell) for cell in row])
        console.print(table)
        for finding in self.findings:
            told = f"{finding.what}: {_text(finding.value)}{finding.unit}"
            console.print(f"  {told}  {finding.target}  {finding.verdict}", markup=False, highlight=False)

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", *_markdown_table(self.columns, self.rows), ""]
        found = [[f.what, f"{_text(f.value)}{f.unit}", f.target, f.verdict] for f in self.findings]
        if found:
            lines += [*_markdown_table(["", "measured", "target", ""], found), ""]
        lines += [f"{note}\n" for note in self.notes]
        return "\n".join(lines)


def publish(report: Report, console: Console | None = None) -> None:
    """Shows the report, with its notes, and saves it."""
    console = console or Console()
    report.show(console)
    for note in report.notes:
        console.print(note, markup=False, highlight=False, style="dim")
    console.print(report.save())


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the module's docstring, line by line."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def this_machine(**more: str) -> Machine:
    """The machine and the versions of what is measured on it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory, 1),
        system=platform.platform(),
        python=platform.python_version(),
        load_before=round(os.getloadavg()[0], 2),
        versions={package: metadata.version(package) for package in _PACKAGES} | more,
    )


def bench_markdown(reports: Sequence[Report]) -> str:
    """The tables of one run, for docs/benchmarks.md."""
    if not reports:
        return ""
    machine = reports[0].machine
    versions: dict[str, str] = {}
    for report in reports:
        versions |= report.machine.versions
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    head = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}, "
        f"Python {machine.python}; {told}. {time.strftime('%Y-%m-%d')}.",
        "",
    ]
    return "\n".join([*head, *(report.markdown() for report in reports)])


def _cpu() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, colon, value = line.partition(":")
        if not colon and fields:
            break
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.processor() or "unknown")
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if not isinstance(cell, float):
        return str(cell)
    digits = 0 if abs(cell) >= 100 else 1 if abs(cell) >= 20 else 2
    return f"{cell:,.{digits}f}" if abs(cell) >= 0.01 or cell == 0 else f"{cell:.2g}"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]
