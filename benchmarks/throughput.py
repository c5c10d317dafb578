"""Output tokens a second of one model: kvloom, then its peers, one after the other, asked the same.

python -m benchmarks.throughput [--shape A B] [--requests 64] [--dtype bfloat16]
[--vllm-setup auto one-process] [--transformers]

Many: `--requests` at once, prompts of 32, 128 and 256 tokens in turn, 64 output tokens each. One: a single
request of 32 prompt tokens and 128 output tokens. Whole answers, not streams, so that the client takes as
little of the cores as it can; a streamed round afterwards gives the time to the first token and between
tokens. Medians of the rounds; every round has prompts of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from benchmarks.load import Load, Summary, summarise
from benchmarks.peers import versions
from benchmarks.places import checkpoint
from benchmarks.process import running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import AS_IT_COMES, BEST_SETUP, VLLM_SETUPS, Served, Vllm, kvloom
from benchmarks.workload import burst

KV_BYTES = 2 << 30
LEAST_RATIO = 1.8
TUNED_IN_16_BITS = 1.3  # what is asked for then, but of vLLM as it comes
WARM_SEED, STREAM_SEED = 1000, 2000
ONE_OUTPUT = 128
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Effort:
    requests: int = 64
    output: int = 64
    one_output: int = ONE_OUTPUT
    rounds: int = 3
    dtype: str = "float32"
    """The number format of the checkpoint, and of vLLM's weights; kvloom has its `auto`."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens a second of each round; streamed: the rounds of many and one that were streamed."""

    many: list[float]
    one: list[float]
    streamed: tuple[Summary, Summary] | None = None


async def measure_server(served: Served, effort: Effort) -> Pace:
    """Start, warm, measure, stop. Raises RuntimeError where the server or a request fails."""
    async with running(served.command, patience=served.patience):
        load = Load({"m": served.url})
        await _round(load, effort.requests, effort.output, WARM_SEED)
        many = [await _round(load, effort.requests, effort.output, seed) for seed in range(effort.rounds)]
        await _round(load, 1, effort.one_output, WARM_SEED)
        one = [await _round(load, 1, effort.one_output, seed) for seed in range(effort.rounds)]
        stream = Load({"m": served.url}, stream=True)
        streamed = (
            await _round(stream, effort.requests, effort.output, STREAM_SEED),
            await _round(stream, 1, effort.one_output, STREAM_SEED),
        )
    return Pace([s.tokens_per_second for s in many], [s.tokens_per_second for s in one], streamed)


async def _round(load: Load, requests: int, output: int, seed: int) -> Summary:
    outcomes, seconds = await load.drive(burst("m", requests, output, seed))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{len(errors)} of {requests} requests failed: {errors[0]}")
    return summarise(outcomes, seconds)


def measure_transformers(shape: str, effort: Effort) -> Pace:
    return Pace(
        _transformers(shape, effort.requests, effort.output, effort.rounds),
        _transformers(shape, 1, effort.one_output, effort.rounds),
    )


def _transformers(shape: str, requests: int, output: int, rounds: int) -> list[float]:
    argv = [sys.executable, "-m", "benchmarks.transformers_peer", "--checkpoint", str(checkpoint(shape))]
    argv += ["--requests", str(requests), "--output", str(output), "--rounds", str(rounds)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"transformers: {ended.stderr[-500:]}")
    paces: list[float] = json.loads(ended.stdout.splitlines()[-1])
    return paces


async def measure(
    shapes: Sequence[str], vllms: Sequence[Vllm], effort: Effort, console: Console, *, transformers: bool
) -> Report:
    """transformers: whether its continuous batching is measured too."""
    paces: dict[tuple[str, str], Pace] = {}
    machine = this_machine(**versions(vllms[0].venv) if vllms else {})
    for shape in shapes:
        path = checkpoint(shape, effort.dtype)
        servers = {"kvloom": kvloom({"m": path}, KV_BYTES)}
        servers |= {f"vLLM, {vllm.setup}": vllm.serve("m", path, KV_BYTES) for vllm in vllms}
        for name, served in servers.items():
            console.print(f"shape {shape}: {name}", style="dim")
            paces[shape, name] = await measure_server(served, effort)
        if transformers:
            console.print(f"shape {shape}: {TRANSFORMERS}", style="dim")
            paces[shape, TRANSFORMERS] = measure_transformers(shape, effort)
    return Report(
        name="throughput" if effort.dtype == "float32" else f"throughput-{effort.dtype}",
        title=f"Output tokens/s in {effort.dtype}: {effort.requests} requests × {effort.output} tokens, "
        f"and one of {effort.one_output}",
        columns=["", "many", "one", "TTFT many, ms", "TPOT many, ms", "TTFT one, ms", "TPOT one, ms"],
        rows=[_row(shape, name, pace) for (shape, name), pace in paces.items()],
        findings=_findings(paces, effort.dtype),
        machine=machine,
        notes=["vLLM's setups are in benchmarks/servers.py. Streamed columns are of one round."],
        raw={f"{shape}/{name}": pace for (shape, name), pace in paces.items()},
    )


def _row(shape: str, name: str, pace: Pace) -> list[Cell]:
    streamed: list[Cell] = []
    for summary in pace.streamed or ():
        streamed += [1e3 * value if value is not None else None for value in (summary.ttft, summary.tpot)]
    return [f"{shape}, {name}", median(pace.many), median(pace.one), *(streamed or [None] * 4)]


def _findings(paces: dict[tuple[str, str], Pace], dtype: str) -> list[Finding]:
    findings = []
    for (shape, peer), theirs in paces.items():
        if peer == "kvloom":
            continue
        ours, least = paces[shape, "kvloom"], None if peer == TRANSFORMERS else LEAST_RATIO
        if least is not None and dtype == "bfloat16" and not peer.endswith(f" {AS_IT_COMES}"):
            least = TUNED_IN_16_BITS
        for told, mine, its in (("many", ours.many, theirs.many), ("one", ours.one, theirs.one)):
            ratio = median(mine) / median(its)
            what = f"shape {shape}, {told}: kvloom / {peer}"
            findings.append(Finding(what=what, value=ratio, unit="×", least=least))
    return findings


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=["A", "B"], default=["A", "B"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--vllm-setup", nargs="*", choices=sorted(VLLM_SETUPS), default=[AS_IT_COMES, BEST_SETUP]
    )
    parser.add_argument("--transformers", action="store_true", help="its continuous batching too")
    options = parser.parse_args()
    if options.transformers and options.dtype != "float32":
        parser.error("--transformers: its rounds are in float32 alone")
    console = Console()
    one_output = min(ONE_OUTPUT, 2 * options.output)
    effort = Effort(options.requests, options.output, one_output, options.rounds, options.dtype)
    vllms = [Vllm(setup=setup, dtype=options.dtype) for setup in options.vllm_setup]
    publish(
        asyncio.run(measure(options.shape, vllms, effort, console, transformers=options.transformers)),
        console,
    )


if __name__ == "__main__":
    main()
