"""What the simulation says of this machine against what it does: the same workload file, real and simulated.

python -m benchmarks.truth [--subject demo A B] [--seconds 60] [--loads 0.3 0.6 0.85] [--quick]

Of each subject first its profile is measured, and the simulation asked how many requests a second it could
answer at most; loads are parts of that. Then `kvloom serve` is asked by `kvloom bench serve` on the same
machine, and `kvloom simulate` plays the same file with the client on it. No figure of a real run goes into a
simulated one. Requests that were refused (429) are counted in both worlds, and told.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.places import BENCH, LOGS, checkpoint
from benchmarks.process import Command, free_port, running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import KVLOOM_PATIENCE
from kvloom.config.config import demo_settings
from kvloom.lab.workload.results import Results, read_results

TRUTH = BENCH / "truth"
MEDIANS_WITHIN, TAILS_WITHIN = 0.10, 0.25
FLOOD = 1000.0  # requests a second: more than any subject can answer
WARM_REQUESTS = 8
REFUSED = re.compile(r"\d+ requests wait for .* already")  # as an engine says it, through a gateway or not
MEASURES = ("TTFT P50", "per token P50", "tok/s", "TTFT P99", "per token P99")
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    seconds: float = 60.0
    loads: tuple[float, ...] = (0.3, 0.6, 0.85)
    flood_requests: int = 300
    quick: bool = False


QUICK = Effort(4.0, (0.3,), 30, quick=True)
SUBJECTS = ("demo", "A", "B")


@dataclass(frozen=True, slots=True)
class Subject:
    """models: name and share of the requests."""

    name: str
    models: dict[str, float]
    config: Settings
    lengths: Settings

    @property
    def folder(self) -> Path:
        return TRUTH / self.name

    def workload(self, rate: float, seed: int, **more: object) -> Settings:
        """seed: another for each, or a later one finds the prompts of an earlier one cached."""
        whole = sum(self.models.values())
        models = {name: {"rate": rate * share / whole} for name, share in self.models.items()}
        return {"seed": seed, "models": models, "lengths": self.lengths, **more}


def subject(name: str) -> Subject:
    if name == "demo":
        config: Settings = demo_settings()
        shares = {model: float(i + 1) for i, model in enumerate(config["models"])}
        return Subject(name, shares, config, {"prompt": [8, 120], "output": [8, 100]})
    config = {"models": {name: str(checkpoint(name))}, "kv_memory": "1GiB"}
    return Subject(name, {name: 1.0}, config, {"prompt": [32, 256], "output": [16, 96]})


async def measure(names: Sequence[str], effort: Effort) -> Report:
    rows: list[list[Cell]] = []
    refused: list[str] = []
    worst = dict.fromkeys(MEASURES, 0.0)
    for name in names:
        for load, rate, real, modelled in await compare(subject(name), effort):
            ratios = [ours / theirs for ours, theirs in zip(told(modelled), told(real), strict=True)]
            rows.append([f"{name}, {load:.0%} ({rate:.2f}/s)", *_cells(real, modelled)])
            refused += [
                f"{results.title}: {_refused(results)}" for results in (real, modelled) if results.errors
            ]
            for measure, ratio in zip(MEASURES, ratios, strict=True):
                worst[measure] = max(worst[measure], abs(ratio - 1.0))
    findings = [
        Finding(
            what=f"{measure}: furthest of all rows",
            value=100 * error,
            unit=" %",
            most=100 * (TAILS_WITHIN if "P99" in measure else MEDIANS_WITHIN),
        )
        for measure, error in worst.items()
    ]
    return Report(
        name="truth",
        title="Real against simulated, the same workload (real, simulated / real)",
        columns=["load", *(column for measure in MEASURES for column in (measure, "×"))],
        rows=rows,
        findings=findings,
        notes=refused,
        machine=this_machine(),
    )


def told(results: Results) -> list[float]:
    """In milliseconds and tokens a second, in the order of MEASURES."""
    total = results.total
    if total.first is None or total.per_token is None:
        raise RuntimeError(f"{results.title}: nothing was answered: {results.errors}")
    return [
        1e3 * total.first.p50,
        1e3 * total.per_token.p50,
        total.tokens_per_second,
        1e3 * total.first.p99,
        1e3 * total.per_token.p99,
    ]


def _refused(results: Results) -> str:
    """Raises RuntimeError for errors that are of another kind."""
    strange = [kind for kind in results.errors if not REFUSED.search(kind)]
    if strange:
        raise RuntimeError(f"{results.title}: {results.errors}")
    return (
        f"{results.total.errors} of {results.total.requests} requests were refused, because too many waited"
    )


def _cells(real: Results, modelled: Results) -> list[Cell]:
    pairs = zip(told(real), told(modelled), strict=True)
    return [cell for one, other in pairs for cell in (one, other / one)]


async def compare(subject: Subject, effort: Effort) -> list[tuple[float, float, Results, Results]]:
    """By load: its part of the most, requests a second, both results."""
    folder = subject.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(subject.config))
    profile = folder / "profile.json"
    await kvloom("profile", config, "-o", profile, *(["--quick"] if effort.quick else []))
    flood = _write(folder / "flood.yaml", subject.workload(FLOOD, 1, requests=effort.flood_requests))
    most = (await simulated(config, profile, flood, folder / "flood.json")).total.requests_per_second
    rates = [load * most for load in effort.loads]
    found = []
    async with served(config) as url:
        warm = _write(folder / "warm.yaml", subject.workload(most / 2, 2, requests=WARM_REQUESTS))
        await asked(url, warm, folder / "warm.json")
        for seed, (load, rate) in enumerate(zip(effort.loads, rates, strict=True), start=7):
            spec = _write(folder / f"{load}.yaml", subject.workload(rate, seed, seconds=effort.seconds))
            workload = folder / f"{load}.jsonl"
            await kvloom("workload", "make", spec, "-o", workload)
            found.append((load, rate, workload, await asked(url, workload, folder / f"{load}.real.json")))
    return [
        (load, rate, real, await simulated(config, profile, workload, folder / f"{load}.sim.json"))
        for load, rate, workload, real in found
    ]


async def asked(url: str, workload: Path, output: Path) -> Results:
    await kvloom("bench", "serve", "--url", url, "--workload", workload, "--json", output)
    return read_results(output)


async def simulated(config: Path, profile: Path, workload: Path, output: Path) -> Results:
    asked = ("--workload", workload, "--client-here")
    await kvloom("simulate", config, "--profile", profile, *asked, "--json", output)
    return read_results(output)


@asynccontextmanager
async def served(config: Path) -> AsyncIterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = [sys.executable, "-m", "kvloom.cli", "serve", str(config), "--port", str(port)]
    log = LOGS / f"truth-{config.parent.name}.log"
    async with running(Command("kvloom", argv, {}, f"{url}/health", log), patience=KVLOOM_PATIENCE):
        yield url


async def kvloom(*arguments: object) -> None:
    """A command of ours, in a process of its own. Raises RuntimeError where it fails."""
    argv = [sys.executable, "-m", "kvloom.cli", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv[3:])} ended with {process.returncode}: {told.decode()[-2000:]}")


def _write(path: Path, settings: Settings) -> Path:
    path.write_text(yaml.safe_dump(settings))
    return path


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.85], help="of the most")
    parser.add_argument("--quick", action="store_true", help="prove that it runs; its numbers are rough")
    options = parser.parse_args()
    effort = Effort(options.seconds, tuple(options.loads), quick=options.quick)
    if options.quick:
        effort = QUICK
    report = asyncio.run(measure(options.subject, effort))
    publish(report)


if __name__ == "__main__":
    main()
