"""All benchmarks, one after the other, on a machine that does nothing else.

python -m benchmarks [NAME …] [--quick]. Each prints its table and writes build/bench/NAME.json; all together
go to build/bench.json and, as tables for docs/benchmarks.md, build/bench.md. Ratios are of one run: a
benchmark starts both sides itself. Some two hours in full; --quick proves that all of it runs.

  engine-step    the engine's own work a step
  gpu-host       the host's work a job of the GPU's executor, without a GPU
  verbs          a verb's round trip, and how many an engine answers
  fleet          how long a period of the fleet scheduler takes, in CPU time
  planner        how long planning takes, in CPU time
  simulator      how long simulating takes, in CPU time
  draws          how often a seeded token changes, and how long a draw takes
  scaling        how own work grows with models, requests, units and contexts
  memory-start   memory, and the time to ready
  memory-load    the memory that a load takes on the way against what stays
  kv-formats     what K and V in fewer bits cost in exactness
  transfer       the KV plane's rate against memcpy's
  tcp-plane      the rate of the KV plane over TCP against plain sockets
  streaming      what the gateway adds, and how many tokens it streams
  faces          what each API's translation adds to a first token
  page-cost      what open pages cost a gateway of 64 units
  page-frames    how smoothly the page of a simulated run plays
  shared-prefix  prompts with common beginnings over two engines; with --trace FILE also those of a trace
  kept-prefixes  a prompt from files after a restart against computed again
  migration      a context moved against computed again
  weaving        what having attention done elsewhere costs and brings
  downtime       how long a request that moves keeps its caller waiting
  truth          what the simulation says of this machine against what it does
  adapters       requests of many adapters in one batch against the base's own
  speculation    the pace with drafts by n-grams and by a model against none
  embeddings     64 texts a request against sentence-transformers
  formats        decoding and prefill by the number format of the weights
  mixed          time per token while long prompts come, with and without mixed jobs
  mixed-jobs     mixed jobs against their prefills and decode steps
  many-models    twenty models in the memory of four, against processes that are swapped
  throughput     one model against vLLM and transformers
  multimodel     four models against four vLLM servers
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

from benchmarks import (
    adapters,
    downtime,
    draws,
    embeddings,
    engine_step,
    faces,
    fleet,
    formats,
    gpu_host,
    kept_prefixes,
    kv_formats,
    many_models,
    memory_load,
    memory_start,
    migration,
    mixed,
    mixed_jobs,
    multimodel,
    page_cost,
    page_frames,
    planner,
    scaling,
    shared_pages,
    shared_prefix,
    simulator,
    speculation,
    streaming,
    tcp_plane,
    throughput,
    transfer,
    truth,
    verbs,
    weaving,
)
from benchmarks.peers import prepare
from benchmarks.places import BUILD, VLLM_VENV
from benchmarks.report import Report, bench_markdown
from benchmarks.servers import AS_IT_COMES, BEST_SETUP, VLLM_SETUPS, Vllm
from kvloom.types.errors import KvloomError

PEERED = frozenset(("throughput", "multimodel"))  # ask servers of others
QUIET = 0.5  # load average above which the machine is not


Measure = Callable[[], Awaitable[Report]]


def plan(options: argparse.Namespace, console: Console) -> dict[str, Measure]:
    """What can be run, by name, cheapest first."""
    return alone(options, console) | served(options, console)


def alone(options: argparse.Namespace, console: Console) -> dict[str, Measure]:
    """What needs no server."""
    quick: bool = options.quick
    streams = streaming.Effort(rounds=20, paces=(5500.0,), tokens=100) if quick else streaming.Effort()
    pages = page_cost.Effort(turns=1, units=8, pages=4, tokens=40) if quick else page_cost.Effort()
    rounds = 1 if quick else 5
    moves = downtime.Effort(lengths=(256,), rounds=1, beside=1) if quick else downtime.Effort()
    talks = shared_prefix.Effort(talks=4, turns=3, pools=(0.75,)) if quick else shared_prefix.Effort()
    return {
        "engine-step": lambda: asyncio.to_thread(engine_step.measure, 64, 100 if quick else 1000),
        "gpu-host": lambda: asyncio.to_thread(gpu_host.measure, 2 if quick else 32, 3 if quick else 20),
        "verbs": lambda: verbs.measure(640 if quick else 6400, 1 if quick else 3),
        "fleet": lambda: asyncio.to_thread(fleet.measure, [*fleet.MOST], 4 if quick else fleet.PERIODS),
        "planner": lambda: asyncio.to_thread(planner.measure, [32] if quick else [*planner.SIZES]),
        "simulator": lambda: asyncio.to_thread(simulator.measure, 200 if quick else simulator.REQUESTS),
        "draws": lambda: asyncio.to_thread(
            draws.measure, 10_000 if quick else draws.TOKENS, 0.2 if quick else 3.0
        ),
        "scaling": lambda: scaling.measure(
            scaling.QUICK if quick else scaling.FULL, list(scaling.TOLD), console
        ),
        "memory-start": lambda: memory_start.measure(1 if quick else 3, console),
        "memory-load": lambda: memory_load.measure([], "auto"),
        "kv-formats": lambda: asyncio.to_thread(kv_formats.measure, 2 if quick else kv_formats.ALL),
        "shared-pages": lambda: shared_pages.measure(
            ["B"] if quick else shared_pages.WANTED, shared_pages.QUICK if quick else shared_pages.Effort()
        ),
        "transfer": lambda: asyncio.to_thread(transfer.measure, 2 if quick else 30),
        "tcp-plane": lambda: asyncio.to_thread(tcp_plane.measure, 2 if quick else 30),
        "streaming": lambda: streaming.measure(streams, console),
        "faces": lambda: faces.measure(20 if quick else faces.ROUNDS),
        "page-cost": lambda: page_cost.measure(pages, console),
        "page-frames": lambda: asyncio.to_thread(page_frames.measure, 200 if quick else simulator.REQUESTS),
        "shared-prefix": lambda: shared_prefix.measure(options.trace, console, talks),
        "kept-prefixes": lambda: kept_prefixes.measure(
            "A", [500] if quick else kept_prefixes.LENGTHS, rounds, console
        ),
        "migration": lambda: migration.measure(rounds, console, [500] if quick else [*migration.WANTED]),
        "weaving": lambda: weaving.measure(weaving.QUICK if quick else weaving.Effort(), console),
        "downtime": lambda: downtime.measure(moves, console),
        "speculation": lambda: speculation.measure("B", 1 if quick else 7, 0, 2, 24 if quick else 120),
        "embeddings": lambda: embeddings.measure(
            embeddings.QUICK if quick else embeddings.Effort(), console.print
        ),
        "formats": lambda: formats.measure(
            ["B"] if quick else formats.WANTED,
            formats.OURS if options.no_peers else [*formats.SIDES],
            formats.QUICK if quick else formats.Effort(),
        ),
        "adapters": lambda: adapters.measure(
            "B" if quick else "A", adapters.QUICK if quick else adapters.Effort()
        ),
        "mixed": lambda: mixed.measure(
            "B", [1] if quick else [1, 2], mixed.QUICK if quick else mixed.Effort()
        ),
        "mixed-jobs": lambda: mixed_jobs.measure("B", 2, 2 if quick else 9),
        "many-models": lambda: many_models.measure(
            many_models.SYSTEMS[:2] if quick else many_models.SYSTEMS,
            many_models.QUICK if quick else many_models.Effort(),
            console,
        ),
    }


def served(options: argparse.Namespace, console: Console) -> dict[str, Measure]:
    """What asks servers, of others too."""
    vllm = Vllm(options.venv, options.vllm_setup)
    quick: bool = options.quick
    setups = [] if options.no_peers else [AS_IT_COMES, BEST_SETUP]
    vllms = [Vllm(options.venv, setup) for setup in setups]
    systems = [*multimodel.POLICIES, *([] if options.no_peers else [multimodel.VLLM])]
    pace = throughput.Effort(requests=6, output=8, one_output=8, rounds=1) if quick else throughput.Effort()
    many = (
        multimodel.Effort(rates=(1.0,), seconds=6.0, lone_rounds=1, rounds=1)
        if quick
        else multimodel.Effort()
    )
    return {
        "truth": lambda: truth.measure(
            ["demo"] if quick else truth.SUBJECTS, truth.QUICK if quick else truth.Effort()
        ),
        "throughput": lambda: throughput.measure(
            ["B"] if quick else ["A", "B"], vllms, pace, console, transformers=not options.no_peers
        ),
        "multimodel": lambda: multimodel.measure(systems, many, vllm, console),
    }


def run(options: argparse.Namespace, console: Console) -> int:
    """Every benchmark that was asked for, whatever became of the one before; the number that failed."""
    plans = plan(options, console)
    if not options.no_peers and PEERED.intersection(options.names or plans):
        prepare(options.venv, console)
    reports, failed = [], 0
    for number, name in enumerate(options.names or plans, 1):
        console.rule(f"{name} ({number} of {len(options.names or plans)})")
        try:
            with console.status(name, refresh_per_second=0.5):
                report = asyncio.run(_await(plans[name]))
        except (RuntimeError, OSError, TimeoutError, KvloomError, ExceptionGroup) as error:
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


async def _await(measure: Measure) -> Report:
    return await measure()


def main() -> None:
    console = Console()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of those above; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes: its numbers mean nothing")
    parser.add_argument("--no-peers", action="store_true", help="kvloom alone")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in Mooncake's form, for shared-prefix")
    parser.add_argument("--venv", type=Path, default=VLLM_VENV, help="where vLLM is or shall be installed")
    parser.add_argument("--vllm-setup", choices=sorted(VLLM_SETUPS), default=BEST_SETUP)
    options = parser.parse_args()
    names = plan(options, console)
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; {', '.join(names)} are right")
    if os.getloadavg()[0] > QUIET:
        busy = f"this machine is busy (load {os.getloadavg()[0]:.1f}): times will be wrong"
        console.print(busy, style="yellow")
    sys.exit(1 if run(options, console) else 0)


if __name__ == "__main__":
    main()
