"""Four models on the same cores and the same KV memory: one kvloom, against four vLLM servers.

python -m benchmarks.multimodel [--rates 0.5 1 2 3 4] [--seconds 60] [--policies adbs fcfs round-robin slack]
[--rounds 2]

Models a1, a2 (shape A), b1, b2 (shape B); rates by power law, α = 2.1, in that order; Poisson arrivals from
one seed, so every system gets the same requests at the same times. A request is in time if it ends within
8 times the latency that such a request has alone. That latency is measured on kvloom and, beside it, the
slower of both servers' is used, which is kinder; both answers are given, and either bound is common to all
systems. kvloom is told neither rates nor shares of memory; each vLLM server gets a quarter of the memory.
Systems are measured one after the other, and in each second round in reverse, so that a machine which
becomes slower or quicker favours none; each round has requests of its own.

By the models' own objective a request is in time if its first token comes within 8 times the time that the
longest prompt's takes alone, and its tokens follow within 8 times the mean time of a lone request. That is
the `slo` which each model has in kvloom's config; it is measured before, on a kvloom of its own.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

from rich.console import Console

from benchmarks.load import Load, Outcome, lone_latency
from benchmarks.peers import versions
from benchmarks.places import checkpoint
from benchmarks.process import running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.servers import BEST_SETUP, VLLM_SETUPS, Vllm, kvloom
from benchmarks.workload import PROMPTS, burst, poisson, power_law
from benchmarks.workload import lone as lone_asks
from kvloom.types.spec import Policy, Slo

SHAPES = {"a1": "A", "a2": "A", "b1": "B", "b2": "B"}
ALPHA, SCALE, LEAST_RATIO = 2.1, 8.0, 2.0
OUTPUTS = (32, 64, 128)
POLICIES: tuple[Policy, ...] = ("adbs", "fcfs", "round-robin", "slack")
LEAST_GAIN, NO_LOSS = 1.25, 1.0  # of `slack`, over the best of the others, at the highest and the lowest rate
VLLM = "4 × vLLM"


# (shape, prompt tokens, output tokens) → seconds of such a request alone on a server
Lone = Mapping[tuple[str, int, int], float]


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is in time if it ends within `scale` times the latency it has alone, counted from when it
    was due. The same for every system compared."""

    lone: Lone
    scale: float

    def met(self, shape: str, outcome: Outcome) -> bool:
        return outcome.error is None and outcome.latency <= self.scale * self.lone[shape, *outcome.ask.kind]


def slower(one: Lone, other: Lone) -> Lone:
    return {kind: max(seconds, other[kind]) for kind, seconds in one.items()}


def attained(objective: Objective, shapes: Mapping[str, str], outcomes: Sequence[Outcome]) -> int:
    """Requests in time. shapes: of each model."""
    return sum(objective.met(shapes[outcome.ask.model], outcome) for outcome in outcomes)


def kept(slos: Mapping[str, Slo], outcome: Outcome) -> bool:
    """Whether a request was answered within its model's own objective. slos: of each model."""
    slo = slos[outcome.ask.model]
    if outcome.error is not None or outcome.ttft is None:
        return False
    after = (outcome.latency - outcome.ttft) / max(outcome.tokens - 1, 1)
    return outcome.ttft <= slo.ttft and after <= slo.tpot


@dataclass(frozen=True, slots=True)
class Effort:
    rates: Sequence[float] = (0.5, 1.0, 2.0, 3.0, 4.0)
    seconds: float = 60.0
    kv_bytes: int = 1 << 30
    lone_rounds: int = 3
    outputs: Sequence[int] = OUTPUTS
    seed: int = 0
    rounds: int = 2


@dataclass(slots=True)
class Record:
    """One system: what a lone request takes, and the outcomes of all rounds at each total rate."""

    lone: Lone = field(default_factory=dict)
    traces: dict[float, list[Outcome]] = field(default_factory=lambda: defaultdict(list))


@asynccontextmanager
async def fleet(
    system: str, kv_bytes: int, vllm: Vllm, slos: Mapping[str, Slo]
) -> AsyncIterator[dict[str, str]]:
    """The system while it serves all four models; each model's URL. vLLM's servers start one by one."""
    paths = {name: checkpoint(shape) for name, shape in SHAPES.items()}
    async with AsyncExitStack() as stack:
        if system == VLLM:
            share = kv_bytes // len(SHAPES)
            servers = {name: vllm.serve(name, path, share) for name, path in paths.items()}
        else:
            (policy,) = (policy for policy in POLICIES if policy == system)
            served = kvloom(paths, kv_bytes, policy, slos)
            servers = dict.fromkeys(SHAPES, served)
        for served in {served.url: served for served in servers.values()}.values():
            await stack.enter_async_context(running(served.command, patience=served.patience))
        yield {name: served.url for name, served in servers.items()}


async def objectives(effort: Effort, vllm: Vllm, console: Console) -> dict[str, Slo]:
    """The objective of each model: `SCALE` times what requests take alone."""
    async with fleet("adbs", effort.kv_bytes, vllm, {}) as urls:
        load = Load(urls, stream=True)
        await _warm(load)
        slos: dict[str, Slo] = {}
        for model in ("a1", "b1"):
            outcomes: list[Outcome] = []
            for prompt in PROMPTS:
                for ask in lone_asks(model, prompt, max(effort.outputs), effort.lone_rounds):
                    outcomes += (await load.drive([ask]))[0]
            longest = [o.ttft for o in outcomes if o.ttft and len(o.ask.prompt) == max(PROMPTS)]
            after = [(o.latency - o.ttft) / (o.tokens - 1) for o in outcomes if o.ttft]
            slos[SHAPES[model]] = Slo(round(SCALE * median(longest), 3), round(SCALE * median(after), 4))
            console.print(f"  shape {SHAPES[model]}: {slos[SHAPES[model]]}", style="dim")
    return {name: slos[shape] for name, shape in SHAPES.items()}


async def _warm(load: Load) -> None:
    await load.drive([ask for name in SHAPES for ask in burst(name, 8, 8, seed=99)])


async def measure_system(
    system: str,
    record: Record,
    turn: int,
    effort: Effort,
    vllm: Vllm,
    slos: Mapping[str, Slo],
    console: Console,
) -> None:
    """Adds one round of the system to its record. What a lone request takes is measured in the first."""
    async with fleet(system, effort.kv_bytes, vllm, slos) as urls:
        load = Load(urls, stream=True)
        await _warm(load)
        record.lone = record.lone or await _lone(load, effort)
        for rate in effort.rates:
            rates = power_law(list(SHAPES), ALPHA, rate)
            asks = poisson(rates, effort.seconds, effort.outputs, effort.seed + turn)
            outcomes, seconds = await load.drive(asks)
            record.traces[rate] += outcomes
            console.print(f"  {system}: {len(asks)} requests at {rate:g}/s took {seconds:.0f} s", style="dim")


async def _lone(load: Load, effort: Effort) -> Lone:
    """The median latency of each kind of request, alone on the idle server."""
    lone: dict[tuple[str, int, int], float] = {}
    for model in ("a1", "b1"):
        for prompt in PROMPTS:
            for output in effort.outputs:
                asks = lone_asks(model, prompt, output, effort.lone_rounds)
                lone[SHAPES[model], prompt, output] = median(await lone_latency(load, asks))
    return lone


async def measure(systems: Sequence[str], effort: Effort, vllm: Vllm, console: Console) -> Report:
    machine = this_machine(**versions(vllm.venv))
    records = {system: Record() for system in systems}
    slos = await objectives(effort, vllm, console)
    for turn in range(effort.rounds):
        for system in systems if turn % 2 == 0 else reversed(systems):
            console.print(f"{system}: starting", style="dim")
            await measure_system(system, records[system], turn, effort, vllm, slos, console)
    scaled = _objectives(records)
    return Report(
        name="multimodel",
        title=f"Four models, α = {ALPHA}, {effort.rounds} × {effort.seconds:g} s at each rate, "
        f"SLO {SCALE:g} × alone",
        columns=[
            "",
            "req/s asked",
            "in time, req/s",
            "in time, %",
            "by slo, %",
            "p50, s",
            "p99, s",
            "failed",
        ],
        rows=[
            _row(system, rate, outcomes, effort.rounds * effort.seconds, scaled[0][1], slos)
            for rate in effort.rates
            for system, record in records.items()
            for outcomes in [record.traces[rate]]
        ],
        findings=_findings(records, effort, scaled) + _gains(records, effort, scaled[0][1], slos),
        machine=machine,
        notes=[
            f"In the table, alone is on kvloom. KV memory {effort.kv_bytes >> 20} MiB in all; vLLM's setup: "
            f"{vllm.setup}.",
            "By slo: "
            + ", ".join(f"{name} {slo.ttft:g} s and {1e3 * slo.tpot:g} ms" for name, slo in slos.items()),
        ],
        raw={system: _raw(record) for system, record in records.items()},
    )


def _objectives(records: dict[str, Record]) -> list[tuple[str, Objective]]:
    """With what they are called. The first is the one by kvloom's own lone latency."""
    ours = records.get("adbs") or next(iter(records.values()))
    found = [("alone on kvloom", Objective(ours.lone, SCALE))]
    if VLLM in records:
        kind = Objective(slower(ours.lone, records[VLLM].lone), SCALE)
        found.append(("alone on the slower", kind))
    return found


def _row(
    system: str,
    rate: float,
    outcomes: Sequence[Outcome],
    seconds: float,
    objective: Objective,
    slos: Mapping[str, Slo],
) -> list[Cell]:
    if not outcomes:
        return [system, rate, 0.0, None, None, None, None, 0]
    met = attained(objective, SHAPES, outcomes)
    latencies = [outcome.latency for outcome in outcomes]
    p99 = quantiles(latencies, n=100)[98] if len(latencies) > 1 else None
    failed = sum(outcome.error is not None for outcome in outcomes)
    in_time = 100 * met / len(outcomes)
    by_slo = 100 * sum(kept(slos, outcome) for outcome in outcomes) / len(outcomes)
    return [system, rate, met / seconds, in_time, by_slo, median(latencies), p99, failed]


def _findings(
    records: dict[str, Record], effort: Effort, objectives: Sequence[tuple[str, Objective]]
) -> list[Finding]:
    """Requests in time, over the whole sweep and at the best rate of each, kvloom's to the others'."""
    findings = []
    for told, objective in objectives:
        counts = {
            system: [attained(objective, SHAPES, record.traces[rate]) for rate in effort.rates]
            for system, record in records.items()
        }
        for system in records:
            if system == "adbs" or "adbs" not in counts:
                continue
            ours, theirs = counts["adbs"], counts[system]
            least = LEAST_RATIO if system == VLLM else None
            for which, mine, its in (
                ("at each one's best rate", max(ours), max(theirs)),
                ("over all rates", sum(ours), sum(theirs)),
            ):
                what = f"in time ({told}), {which}: adbs / {system}"
                findings.append(Finding(what=what, value=mine / max(its, 1), unit="×", least=least))
    return findings


def _gains(
    records: dict[str, Record], effort: Effort, objective: Objective, slos: Mapping[str, Slo]
) -> list[Finding]:
    """Requests in time under `slack`, to those under the best of the other policies."""
    others = [system for system in records if system not in ("slack", VLLM)]
    findings = []
    for rate in sorted(effort.rates) if "slack" in records and others else ():
        least = {min(effort.rates): NO_LOSS, max(effort.rates): LEAST_GAIN}.get(rate)
        by_slo, scaled = (
            {system: sum(map(met, record.traces[rate])) for system, record in records.items()}
            for met in (partial(kept, slos), lambda o: objective.met(SHAPES[o.ask.model], o))
        )
        for told, counts in (("slo", by_slo), (f"{SCALE:g} × alone", scaled)):
            gain = counts["slack"] / max(1, *(counts[system] for system in others))
            what = f"in time ({told}) at {rate:g}/s: slack / the best other policy"
            findings.append(Finding(what=what, value=gain, unit="×", least=least))
    return findings


def _raw(record: Record) -> dict[str, object]:
    lone = [[*kind, seconds] for kind, seconds in record.lone.items()]
    traces = {
        f"{rate:g}": [
            [o.ask.model, *o.ask.kind, round(o.ask.at, 4), o.ttft, o.latency, o.error] for o in outcomes
        ]
        for rate, outcomes in record.traces.items()
    }
    return {"lone": lone, "traces": traces}


def main() -> None:
    usual = Effort()
    parser = make_parser(__doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=list(usual.rates))
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of arrivals, at each rate")
    parser.add_argument("--kv-mib", type=int, default=usual.kv_bytes >> 20, help="KV memory in all")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--vllm-setup", choices=["none", *sorted(VLLM_SETUPS)], default=BEST_SETUP)
    parser.add_argument("--lone-rounds", type=int, default=usual.lone_rounds)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    options = parser.parse_args()
    effort = Effort(
        rates=options.rates,
        seconds=options.seconds,
        kv_bytes=options.kv_mib << 20,
        lone_rounds=options.lone_rounds,
        seed=options.seed,
        rounds=options.rounds,
    )
    without = options.vllm_setup == "none"
    systems = [*options.policies, *([] if without else [VLLM])]
    vllm = Vllm(setup=BEST_SETUP if without else options.vllm_setup)
    console = Console()
    publish(asyncio.run(measure(systems, effort, vllm, console)), console)


if __name__ == "__main__":
    main()
