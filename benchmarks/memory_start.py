"""Memory and start: what the processes of `kvloom serve` hold, and how soon they answer.

python -m benchmarks.memory_start. Start: from the command to the first 200 of /health. The engine's memory
beyond its weights and its arena is what its mappings hold resident, less the arena's own, less the weights
once; measured after some requests to every model.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.load import Load
from benchmarks.places import LOGS, ROOT, checkpoint
from benchmarks.process import Command, free_port, running
from benchmarks.procfs import Memory, command_line, descendants, memory
from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import KVLOOM_PATIENCE
from benchmarks.workload import Ask

DEMO = ROOT / "src" / "kvloom" / "demo"
MOST_ENGINE, MOST_GATEWAY, MOST_START = 800.0, 300.0, 15.0
KV = "512MiB"
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """weights: MiB of all models' parameters once, as served."""

    start: float
    engine: Memory
    gateway: Memory
    weights: float

    @property
    def extra(self) -> float:
        return self.engine.rss - self.engine.arena - self.weights


async def look(name: str, models: Mapping[str, Path], argv: list[str]) -> Seen:
    """Start the fleet, ask every model for something, look at its processes, end it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    full = [sys.executable, "-m", "kvloom.cli", "serve", "--port", str(port), *argv]
    command = Command(f"kvloom, {name}", full, {}, f"{url}/health", LOGS / f"kvloom-{name}.log")
    async with running(command, patience=KVLOOM_PATIENCE) as server:
        load = Load(dict.fromkeys(models, url))
        outcomes, _ = await load.drive([Ask(m, [65 + i] * 48, 16) for m in models for i in range(8)])
        if errors := [outcome.error for outcome in outcomes if outcome.error]:
            raise RuntimeError(errors[0])
        found = {command_line(pid): pid for pid in descendants(server.pid)}
        (engine,) = (pid for line, pid in found.items() if "engine_process" in line)
        (gateway,) = (pid for line, pid in found.items() if "gateway_process" in line)
        weights = sum(parameters(path) for path in models.values()) * FLOAT32 / (1 << 20)
        return Seen(server.start_seconds, memory(engine), memory(gateway), weights)


def parameters(path: Path) -> int:
    """Counted in the headers of a checkpoint's safetensors files."""
    total = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        total += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


async def measure(rounds: int, console: Console) -> Report:
    machine = this_machine()
    demo = {path.parent.name: path.parent for path in sorted(DEMO.glob("*/config.json"))}
    shapes = {"a": checkpoint("A"), "b": checkpoint("B")}
    flags = [flag for name, path in shapes.items() for flag in ("--model", f"{name}={path}")]
    console.print("memory and start: the demo fleet, then shapes A and B", style="dim")
    starts = [await look("demo", demo, []) for _ in range(rounds)]
    fleets = {"demo fleet": starts[-1], "A and B": await look("shapes", shapes, [*flags, "--kv-memory", KV])}
    start = median(seen.start for seen in starts)
    findings = [Finding(what="demo fleet: start to /health", value=start, unit=" s", most=MOST_START)]
    for name, seen in fleets.items():
        findings += [
            Finding(
                what=f"{name}: engine beyond weights and arena",
                value=seen.extra,
                unit=" MiB",
                most=MOST_ENGINE,
            ),
            Finding(what=f"{name}: gateway", value=seen.gateway.rss, unit=" MiB", most=MOST_GATEWAY),
        ]
    return Report(
        name="memory-start",
        title="Memory (MiB) and start (s)",
        columns=["", "start", "engine RSS", "engine PSS", "arena", "files", "weights", "gateway RSS"],
        rows=[
            [
                name,
                seen.start,
                seen.engine.rss,
                seen.engine.pss,
                seen.engine.arena,
                seen.engine.files,
                seen.weights,
                seen.gateway.rss,
            ]
            for name, seen in fleets.items()
        ],
        findings=findings,
        machine=machine,
        notes=[
            "files: checkpoint files still mapped and resident, a part of RSS; weights: parameters × 4 bytes."
        ],
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="starts of the demo fleet")
    options = parser.parse_args()
    console = Console()
    publish(asyncio.run(measure(options.rounds, console)), console)


if __name__ == "__main__":
    main()
