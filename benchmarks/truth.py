"""What the simulation says of this machine against what it does: the same workload file, real and simulated.

python -m benchmarks.truth [--subject demo A B] [--seconds 30] [--rounds 3] [--loads 0.3 0.6 0.85] [--quick]

Of each subject first its profile is measured, and the simulation asked how many requests a second it could
answer at most; loads are parts of that. `kvloom simulate` plays them with the client on the same machine.
Then `kvloom serve` is asked for the same files by `kvloom bench serve`, at once and in rounds, because a
machine's own pace changes within minutes: a real measure is the median of its rounds, and it is told how
well one round foretells the others. No figure of a real run goes into a simulated one. Requests that were
refused (429) are counted in both worlds, and told.

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
from statistics import fmean, median
from typing import Any, NamedTuple

import yaml

from benchmarks.places import BENCH, LOGS, checkpoint
from benchmarks.process import Command, free_port, running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import KVLOOM_PATIENCE
from kvloom.config.config import demo_settings
from kvloom.lab.workload.results import Results, read_results

TRUTH = BENCH / "truth"
FLOOD = 1000.0  # requests a second: more than any subject can answer
WARM_REQUESTS, WARM_RATE = 8, 4.0
FIRST_SEED = 7  # each load has another, or a later one finds the prompts of an earlier one cached
REFUSED = re.compile(r"\d+ requests wait for .* already")  # as an engine says it, through a gateway or not
Settings = dict[str, Any]


class Kind(NamedTuple):
    """Measures of one kind, and the part by which simulated ones may differ from real ones."""

    name: str
    measures: tuple[str, ...]
    bound: float


MEDIANS = Kind("medians", ("TTFT P50", "per token P50", "tok/s"), 0.10)
TAILS = Kind("tails", ("TTFT P99", "per token P99"), 0.25)
MEASURES = MEDIANS.measures + TAILS.measures


@dataclass(frozen=True, slots=True)
class Effort:
    seconds: float = 30.0
    rounds: int = 3
    loads: tuple[float, ...] = (0.3, 0.6, 0.85)
    flood_requests: int = 300
    quick: bool = False


WHOLE = Effort()
QUICK = Effort(4.0, 2, (0.3,), 30, quick=True)
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


@dataclass(frozen=True, slots=True)
class Foretold:
    """A load: its name, its file, and what was simulated of it."""

    what: str
    file: Path
    modelled: Results


@dataclass(frozen=True, slots=True)
class Compared:
    """A load's simulated results and those of all real rounds."""

    what: str
    modelled: Results
    real: list[Results]

    def ratios(self) -> list[float]:
        """Returns the simulated over the real measures, in the median of the rounds."""
        return _over(told(self.modelled), self.real)

    def among_rounds(self) -> list[list[float]]:
        """Returns for each round its measures over those of the others, in the median."""
        rounds = range(len(self.real))
        return [
            _over(told(self.real[at]), [self.real[other] for other in rounds if other != at]) for at in rounds
        ]


def _over(measures: Sequence[float], real: Sequence[Results]) -> list[float]:
    return [one / other for one, other in zip(measures, _medians(real), strict=True)]


def _medians(real: Sequence[Results]) -> list[float]:
    return [median(found) for found in zip(*map(told, real), strict=True)]


async def measure(names: Sequence[str], effort: Effort, *, frozen: bool = False) -> Report:
    compared = list[Compared]()
    for one in map(subject, names):
        loads = await (foretell_fresh(one, effort) if frozen else foretell(one, effort))
        rounds = [await ask_all(one, loads) for _ in range(effort.rounds)]
        compared += [
            Compared(f"{one.name}, {load.what}", load.modelled, list(real))
            for load, real in zip(loads, zip(*rounds, strict=True), strict=True)
        ]
    return report_of(compared, "foretold" if frozen else "truth")


def report_of(compared: Sequence[Compared], name: str) -> Report:
    ratios = [one.ratios() for one in compared]
    notes = [
        f"{results.title}: {_refused(results)}"
        for one in compared
        for results in (*one.real, one.modelled)
        if results.errors
    ]
    rounds = len(compared[0].real)
    if rounds > 1:
        by_round = zip(*[one.among_rounds() for one in compared], strict=True)
        counts = [[_within(kind, cells)[0] for kind in (MEDIANS, TAILS)] for cells in by_round]
        medians, tails = (fmean(column) for column in zip(*counts, strict=True))
        notes.append(
            f"a real round foretells the others within the same bounds in {medians:.1f} medians and "
            f"{tails:.1f} tails, in the mean of {rounds} rounds"
        )
    return Report(
        name=name,
        title=f"Real in the median of {rounds} rounds, and simulated / real, of the same workload",
        columns=["load", *(title for column in MEASURES for title in (column, "×"))],
        rows=[_row(one) for one in compared],
        findings=[
            _finding(kind, *_within(kind, ratios), wanted)
            for kind, wanted in ((MEDIANS, 0.88), (TAILS, 0.83))
        ],
        notes=notes,
        machine=this_machine(),
    )


def _row(one: Compared) -> list[Cell]:
    pairs = zip(_medians(one.real), one.ratios(), strict=True)
    return [one.what, *(cell for pair in pairs for cell in pair)]


def _within(kind: Kind, ratios: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Returns how many of a kind's cells have ratios within its bound, and of how many."""
    cells = [row[MEASURES.index(measure)] for row in ratios for measure in kind.measures]
    return sum(abs(ratio - 1.0) <= kind.bound for ratio in cells), len(cells)


def _finding(kind: Kind, good: int, cells: int, wanted: float) -> Finding:
    """wanted: the part of the cells that ought to be within the bound."""
    what = f"{kind.name} within {kind.bound:.0%}, of {cells}"
    return Finding(what=what, value=good, least=math.ceil(wanted * cells))


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


async def foretell(subject: Subject, effort: Effort) -> list[Foretold]:
    """Returns what is simulated of each load, by a profile that is measured first."""
    write_config(subject)
    quick = ["--quick"] if effort.quick else []
    await kvloom("profile", subject.config_file, "-o", subject.profile, *quick)
    most = await answered_at_most(subject, {}, effort)
    return await simulate_all(subject, effort, [(f"{load:.0%}", load * most, {}) for load in effort.loads])


async def foretell_fresh(subject: Subject, effort: Effort) -> list[Foretold]:
    """Returns what is simulated of workloads that are unlike those that a profile is measured by. The profile
    is there already, and what is foretold is written down before anything is asked."""
    write_config(subject)
    fresh = [
        (what, FRESH_LOAD * await answered_at_most(subject, more, effort), more)
        for what, more in FRESH.items()
    ]
    found = await simulate_all(subject, effort, fresh)
    _write(subject.folder / "foretold.yaml", {one.what: told(one.modelled) for one in found})
    return found


def write_config(subject: Subject) -> None:
    subject.folder.mkdir(parents=True, exist_ok=True)
    _write(subject.config_file, subject.config)


async def answered_at_most(subject: Subject, more: Settings, effort: Effort) -> float:
    """Returns how many requests a second the simulation can answer."""
    settings = subject.workload(FLOOD, 1, requests=effort.flood_requests) | more
    flood = _write(subject.folder / "flood.yaml", settings)
    return (await simulated(subject, flood, subject.folder / "flood.json")).total.requests_per_second


async def simulate_all(
    subject: Subject, effort: Effort, loads: Sequence[tuple[str, float, Settings]]
) -> list[Foretold]:
    """Makes and simulates each load. loads: a name, requests a second, and what the workload has besides."""
    folder, found = subject.folder, list[Foretold]()
    for seed, (what, rate, more) in enumerate(loads, start=FIRST_SEED):
        settings = subject.workload(rate, seed, seconds=effort.seconds) | more
        spec, workload = _write(folder / f"{what}.yaml", settings), folder / f"{what}.jsonl"
        await kvloom("workload", "make", spec, "-o", workload)
        modelled = await simulated(subject, workload, workload.with_suffix(".sim.json"))
        found.append(Foretold(f"{what} ({rate:.2f}/s)", workload, modelled))
    return found


async def ask_all(subject: Subject, loads: Sequence[Foretold]) -> list[Results]:
    """Returns the real results of each load, by a server that is new and so has no prompt of them cached."""
    async with served(subject.config_file) as url:
        warm = _write(subject.folder / "warm.yaml", subject.workload(WARM_RATE, 2, requests=WARM_REQUESTS))
        await asked(url, warm, subject.folder / "warm.json")
        return [await asked(url, load.file, load.file.with_suffix(".real.json")) for load in loads]


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
    parser.add_argument("--seconds", type=float, default=WHOLE.seconds, help="of each load, in each round")
    parser.add_argument("--rounds", type=int, default=WHOLE.rounds, help="of real runs")
    parser.add_argument("--loads", type=float, nargs="+", default=WHOLE.loads, help="of the most")
    parser.add_argument("--quick", action="store_true", help="prove that it runs; its numbers are rough")
    parser.add_argument("--frozen", action="store_true", help="other workloads, by profiles that are there")
    options = parser.parse_args()
    effort = Effort(options.seconds, options.rounds, tuple(options.loads))
    if options.quick:
        effort = QUICK
    report = asyncio.run(measure(options.subject, effort, frozen=options.frozen))
    publish(report)


if __name__ == "__main__":
    main()
