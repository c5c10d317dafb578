"""What the simulation says of this machine against what it does: the same workload file, real and simulated.

python -m benchmarks.truth [--subject demo A B] [--seconds 60] [--loads 0.3 0.6 0.85] [--quick]

Of each subject first its profile is measured, and the simulation asked how many requests a second it could
answer at most; loads are parts of that. Then `kvloom serve` is asked by `kvloom bench serve` on the same
machine, and `kvloom simulate` plays the same file with the client on it. No figure of a real run goes into a
simulated one. Requests that were refused (429) are counted in both worlds, and told.

python -m benchmarks.truth --frozen [--subject demo A B] takes the profiles that are there from an earlier
run, and workloads of other lengths and arrivals, `FRESH`, each at half of what the simulation says can be
answered. What is foretold is written to `foretold.yaml` in the subject's folder before the server is started.
"""

from __future__ import annotations

import asyncio
import math
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
MEDIANS, TAILS = ("TTFT P50", "per token P50", "tok/s"), ("TTFT P99", "per token P99")
MEASURES = MEDIANS + TAILS
Settings = dict[str, Any]
Compared = tuple[str, Results, Results]  # what was asked, and the real and the simulated results


@dataclass(frozen=True, slots=True)
class Effort:
    seconds: float = 60.0
    loads: tuple[float, ...] = (0.3, 0.6, 0.85)
    flood_requests: int = 300
    quick: bool = False


QUICK = Effort(4.0, (0.3,), 30, quick=True)
SUBJECTS = ("demo", "A", "B")
FRESH: dict[str, Settings] = {
    "bursts": {"lengths": {"prompt": [16, 200], "output": [8, 64]}, "arrivals": {"cv": 2}},
    "long prompts": {"lengths": {"prompt": [150, 400], "output": [4, 16]}},
    "long answers": {"lengths": {"prompt": [4, 24], "output": [96, 160]}},
}
FRESH_LOAD = 0.5


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

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def profile(self) -> Path:
        return self.folder / "profile.json"

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


async def measure(names: Sequence[str], effort: Effort, *, frozen: bool = False) -> Report:
    rows: list[list[Cell]] = []
    refused: list[str] = []
    ratios: dict[str, list[float]] = {name: [] for name in MEASURES}
    for name in names:
        one = subject(name)
        for what, real, modelled in await (foretell(one, effort) if frozen else compare(one, effort)):
            rows.append([f"{name}, {what}", *_cells(real, modelled)])
            refused += [
                f"{results.title}: {_refused(results)}" for results in (real, modelled) if results.errors
            ]
            for column, ours, theirs in zip(MEASURES, told(modelled), told(real), strict=True):
                ratios[column].append(ours / theirs)
    return Report(
        name="foretold" if frozen else "truth",
        title="Real against simulated, the same workload (real, simulated / real)",
        columns=["load", *(title for column in MEASURES for title in (column, "×"))],
        rows=rows,
        findings=[
            _within("medians", ratios, MEDIANS, MEDIANS_WITHIN, 0.88),
            _within("tails", ratios, TAILS, TAILS_WITHIN, 0.83),
        ],
        notes=refused,
        machine=this_machine(),
    )


def _within(
    what: str, ratios: dict[str, list[float]], measures: Sequence[str], bound: float, wanted: float
) -> Finding:
    """Returns how many cells' ratios are within the bound. wanted: the part that ought to be."""
    cells = [ratio for column in measures for ratio in ratios[column]]
    good = sum(abs(ratio - 1.0) <= bound for ratio in cells)
    return Finding(
        what=f"{what} within {bound:.0%}, of {len(cells)}", value=good, least=math.ceil(wanted * len(cells))
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


async def compare(subject: Subject, effort: Effort) -> list[Compared]:
    """Returns the results of each load, by a profile that is measured first."""
    write_config(subject)
    quick = ["--quick"] if effort.quick else []
    await kvloom("profile", subject.config_file, "-o", subject.profile, *quick)
    most = await answered_at_most(subject, {}, effort)
    return await play(subject, effort, [(f"{load:.0%}", load * most, {}) for load in effort.loads])


async def foretell(subject: Subject, effort: Effort) -> list[Compared]:
    """Returns the results of workloads that are unlike those that a profile is measured by. The profile is
    there already, and what is foretold is written down before anything is asked."""
    write_config(subject)
    fresh = [
        (what, FRESH_LOAD * await answered_at_most(subject, more, effort), more)
        for what, more in FRESH.items()
    ]
    return await play(subject, effort, fresh, foretold=subject.folder / "foretold.yaml")


def write_config(subject: Subject) -> None:
    subject.folder.mkdir(parents=True, exist_ok=True)
    _write(subject.config_file, subject.config)


async def answered_at_most(subject: Subject, more: Settings, effort: Effort) -> float:
    """Returns how many requests a second the simulation can answer."""
    settings = subject.workload(FLOOD, 1, requests=effort.flood_requests) | more
    flood = _write(subject.folder / "flood.yaml", settings)
    return (await simulated(subject, flood, subject.folder / "flood.json")).total.requests_per_second


async def play(
    subject: Subject,
    effort: Effort,
    loads: Sequence[tuple[str, float, Settings]],
    foretold: Path | None = None,
) -> list[Compared]:
    """Plays each load in both worlds. loads: a name, requests a second, and what the workload has besides.
    foretold: the file for the simulated results, if these come first."""
    folder, made = subject.folder, list[tuple[str, float, Path]]()
    for seed, (what, rate, more) in enumerate(loads, start=7):
        settings = subject.workload(rate, seed, seconds=effort.seconds) | more
        spec, workload = _write(folder / f"{what}.yaml", settings), folder / f"{what}.jsonl"
        await kvloom("workload", "make", spec, "-o", workload)
        made.append((f"{what} ({rate:.2f}/s)", rate, workload))
    modelled = [await simulated(subject, file, file.with_suffix(".sim.json")) for _, _, file in made]
    if foretold is not None:
        _write(foretold, {what: told(one) for (what, _, _), one in zip(made, modelled, strict=True)})
    found = []
    async with served(subject.config_file) as url:
        warm = _write(folder / "warm.yaml", subject.workload(made[0][1], 2, requests=WARM_REQUESTS))
        await asked(url, warm, folder / "warm.json")
        for (what, _, file), ours in zip(made, modelled, strict=True):
            found.append((what, await asked(url, file, file.with_suffix(".real.json")), ours))
    return found


async def asked(url: str, workload: Path, output: Path) -> Results:
    await kvloom("bench", "serve", "--url", url, "--workload", workload, "--json", output)
    return read_results(output)


async def simulated(subject: Subject, workload: Path, output: Path) -> Results:
    given = ("--profile", subject.profile, "--workload", workload, "--client-here")
    await kvloom("simulate", subject.config_file, *given, "--json", output)
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
    parser.add_argument("--frozen", action="store_true", help="other workloads, by profiles that are there")
    options = parser.parse_args()
    effort = Effort(options.seconds, tuple(options.loads), quick=options.quick)
    if options.quick:
        effort = QUICK
    report = asyncio.run(measure(options.subject, effort, frozen=options.frozen))
    publish(report)


if __name__ == "__main__":
    main()
