"""All benchmarks, one after the other, on a machine that does nothing else.

python -m benchmarks [NAME …] [--quick]. Each prints its table and writes build/bench/NAME.json; all together
go to build/bench.json and, as tables for docs/benchmarks.md, build/bench.md. Ratios are of one run: a
benchmark starts both sides itself. About an hour and a half in full; --quick proves that all of it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import engine_step, memory_start, multimodel, streaming, throughput
from benchmarks.peers import prepare
from benchmarks.places import BUILD, VLLM_VENV
from benchmarks.report import Report, bench_markdown
from benchmarks.servers import AS_IT_COMES, BEST_SETUP, VLLM_SETUPS, Vllm

QUIET = 0.5  # load average above which the machine is not


def plan(options: argparse.Namespace, console: Console) -> dict[str, Callable[[], Awaitable[Report]]]:
    """What can be run, by name, cheapest first."""
    vllm = Vllm(options.venv, options.vllm_setup)
    quick: bool = options.quick
    setups = [] if options.no_peers else [AS_IT_COMES, BEST_SETUP]
    vllms = [Vllm(options.venv, setup) for setup in setups]
    systems = [*multimodel.POLICIES, *([] if options.no_peers else [multimodel.VLLM])]
    pace = throughput.Effort(requests=6, output=8, one_output=8, rounds=1) if quick else throughput.Effort()
    streams = streaming.Effort(rounds=20, paces=(5500.0,), tokens=100) if quick else streaming.Effort()
    many = multimodel.Effort(rates=(1.0,), seconds=6.0, lone_rounds=1) if quick else multimodel.Effort()

    async def step() -> Report:
        return await asyncio.to_thread(engine_step.measure, 64, 100 if quick else 1000)

    return {
        "engine-step": step,
        "memory-start": lambda: memory_start.measure(1 if quick else 3, console),
        "streaming": lambda: streaming.measure(streams, console),
        "throughput": lambda: throughput.measure(
            ["B"] if quick else ["A", "B"], vllms, pace, console, transformers=not options.no_peers
        ),
        "multimodel": lambda: multimodel.measure(systems, many, vllm, console),
    }


def run(options: argparse.Namespace, console: Console) -> int:
    """Every benchmark that was asked for, whatever became of the one before; the number that failed."""
    if not options.no_peers:
        prepare(options.venv, console)
    plans = plan(options, console)
    reports, failed = [], 0
    for number, name in enumerate(options.names or plans, 1):
        console.rule(f"{name} ({number} of {len(options.names or plans)})")
        try:
            with console.status(name, refresh_per_second=0.5):
                report = asyncio.run(_await(plans[name]))
        except (RuntimeError, OSError, TimeoutError) as error:
            console.print(f"{name} failed: {error}", style="red", markup=False)
            failed += 1
            continue
        report.show(console)
        report.save()
        reports.append(report)
        write(reports, BUILD)
    console.print(f"{BUILD / 'bench.json'}, {BUILD / 'bench.md'}")
    return failed


def write(reports: list[Report], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
    (folder / "bench.md").write_text(bench_markdown(reports), "utf-8")


async def _await(measure: Callable[[], Awaitable[Report]]) -> Report:
    return await measure()


def main() -> None:
    names = ["engine-step", "memory-start", "streaming", "throughput", "multimodel"]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="small sizes: its numbers mean nothing")
    parser.add_argument("--no-peers", action="store_true", help="kvloom alone")
    parser.add_argument("--venv", type=Path, default=VLLM_VENV, help="where vLLM is or shall be installed")
    parser.add_argument("--vllm-setup", choices=sorted(VLLM_SETUPS), default=BEST_SETUP)
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; {', '.join(names)} are right")
    console = Console()
    if os.getloadavg()[0] > QUIET:
        busy = f"this machine is busy (load {os.getloadavg()[0]:.1f}): times will be wrong"
        console.print(busy, style="yellow")
    sys.exit(1 if run(options, console) else 0)


if __name__ == "__main__":
    main()
