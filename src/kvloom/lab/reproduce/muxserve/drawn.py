"""Units and loads that are drawn, none of them a paper's: how well equation 3 foretells (section 3.3), and
which policy is best for which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, median
from typing import Final

import numpy as np
from msgspec import structs

from kvloom.lab.reproduce.muxserve.points import Point, play_units
from kvloom.lab.reproduce.muxserve.setup import CHATLMSYS, Load, Served, cluster
from kvloom.lab.reproduce.muxserve.systems import System, make_units, together
from kvloom.lab.reproduce.report import Cell, Claim, Grid, Report, Scale, Tell, duration
from kvloom.lab.reproduce.setup import play_all
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.plan.cluster import DeviceCosts
from kvloom.plan.estimate import Estimate, Estimator
from kvloom.types.spec import DEFAULT_POLICY, Policy, Quotas

SIZES: Final[Mapping[int, tuple[str, ...]]] = {1: ("7b", "13b"), 2: ("7b", "13b"), 4: ("7b", "13b", "30b")}
"""The models that are drawn, by the GPUs of the unit."""
MEMORIES: Final[Mapping[str, float]] = {"short": 0.05, "some": 0.2, "ample": 1.0}
"""The part of what weights leave that is the pool, by name."""
LOADS: Final[Mapping[str, float]] = {"light": 0.5, "near what it can": 0.9, "overload": 1.5}
"""The load over what equation 3 says that the unit answers with all of the memory, by name."""
PHASES: Final = ("alike", "unlike")
"""The kinds of phases: the models' prompts and answers are as long as the others', or one has long prompts
and another long answers."""
_LONGEST: Final = 4096  # tokens of the largest model for which any pool has room
_FLOOD: Final = 200.0  # requests a second, which no unit answers
_PROMPT: Final = (60.0, 400.0)  # tokens, the least and the largest mean
_OUTPUT: Final = (60.0, 250.0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A unit and what it is asked."""

    memory: str
    load: str
    phases: str
    gpus: int
    models: tuple[Served, ...]
    planned: tuple[Served, ...] = ()
    """The same models with the rates that the unit is made for; if they are left out, the rates are those
    that come."""

    def lasting(self, requests: int) -> float:
        """Returns the seconds in which so many requests come."""
        return requests / sum(model.rate for model in self.models)

    def play(self, policy: Policy, seconds: float, tell: Callable[[float], None]) -> Point:
        """Plays what comes in so many seconds under the policy."""
        units = make_units(_system(policy), self.planned or self.models, self.gpus)
        load = Load(self.models, self.gpus, seconds)
        return play_units([self._short(unit) for unit in units], load, tell)

    def estimate(self) -> Estimate:
        """Returns what equation 3 says, with all of the memory."""
        return _estimate(self.models, self.gpus)

    def _short(self, unit: SimulatedUnit) -> SimulatedUnit:
        least = _LONGEST * max(shape.kv_bytes for shape in unit.shapes.values())
        pool = max(least, int(MEMORIES[self.memory] * unit.spec.kv_bytes))
        return replace(unit, spec=structs.replace(unit.spec, kv_bytes=min(pool, unit.spec.kv_bytes)))


def _system(policy: Policy) -> System:
    """kvloom's own runtime, in which a job that runs alone has the whole device."""
    quotas: Quotas = "sequences" if policy == "adbs-2024" else "adaptive"
    return System(policy, together, policy=policy, quotas=quotas, runtime="kvloom")


def _estimate(models: Sequence[Served], gpus: int) -> Estimate:
    nodes, demands = cluster(gpus), [model.demand for model in models]
    estimator = Estimator(demands, DeviceCosts(nodes, demands, None))
    items = frozenset(estimator.item(n, 1) for n in range(len(models)))
    return estimator.known(nodes[0].mesh(gpus), items)


def draw(memory: str, load: str, phases: str, seed: int) -> Drawn:
    """Draws a unit of its kind: GPUs, models, popularity, lengths."""
    rng = np.random.default_rng([seed, *map(len, (memory, load, phases))])
    gpus = int(rng.choice([*SIZES]))
    count = int(rng.integers(2, 2 + min(gpus, 3)))
    sizes = sorted(rng.choice(SIZES[gpus], count).tolist())
    parts = np.arange(1, count + 1) ** -rng.uniform(0.0, 2.0)
    rng.shuffle(parts)
    means = [(_log(rng, *_PROMPT), _log(rng, *_OUTPUT)) for _ in sizes]
    if phases == "alike":
        means = means[:1] * count
    else:
        means[:2] = [(_PROMPT[1], _OUTPUT[0]), (_PROMPT[0], _OUTPUT[1])]
    shaped = tuple(
        Served(f"{n}-{size}", size, float(part), CHATLMSYS.scaled(*mean))
        for n, (size, part, mean) in enumerate(zip(sizes, parts, means, strict=True), 1)
    )
    flood = _rated(shaped, _FLOOD)
    answered = _FLOOD * _estimate(flood, gpus).level
    return Drawn(memory, load, phases, gpus, _rated(shaped, answered * LOADS[load]))


def _log(rng: np.random.Generator, least: float, most: float) -> float:
    return float(np.exp(rng.uniform(np.log(least), np.log(most))))


def _rated(models: Sequence[Served], rate: float) -> tuple[Served, ...]:
    whole = sum(model.rate for model in models)
    return tuple(replace(model, rate=model.rate * rate / whole) for model in models)


# -- policies ---------------------------------------------------------------------------------------------

POLICIES: Final[tuple[Policy, ...]] = ("adbs", "slack", "round-robin", "fcfs", "adbs-2024")
REQUESTS: Final[Mapping[Scale, int]] = {"full": 300, "small": 60}  # of each run
SLO: Final = 8  # times what a request takes alone: the paper's own scale of figures 7 and 9
NOISE: Final = 0.03  # of requests in time: what another draw of the same kinds changes


def workloads(scale: Scale) -> list[Drawn]:
    """Returns one of each kind of memory, load and phases; at the small scale those near what a unit can."""
    return [
        draw(memory, load, phases, seed)
        for seed, (memory, load, phases) in enumerate(
            (memory, load, phases) for memory in MEMORIES for load in LOADS for phases in PHASES
        )
        if scale == "full" or (memory != "some" and load == "near what it can")
    ]


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a policy over several workloads: the mean part of the requests that are in time, and the
    geometric mean of its throughput over the best policy's."""

    in_time: float
    throughput: float


Found = Mapping[Policy, Sequence[Point]]
"""The points of each policy, one for each workload."""


def play_policies(
    drawn: Sequence[Drawn],
    policies: Sequence[Policy],
    seconds: Callable[[Drawn], float],
    tell: Tell,
) -> Found:
    """Plays each workload under each policy. `seconds` returns those for which a workload's requests come."""
    runs = [(policy, one) for policy in policies for one in drawn]
    points = play_all(
        runs,
        lambda run, part: run[1].play(run[0], seconds(run[1]), part),
        lambda run: f"{run[0]}, {run[1].memory} memory, {run[1].load}, {run[1].phases}",
        tell,
    )
    each = len(drawn)
    return {policy: points[n * each : (n + 1) * each] for n, policy in enumerate(policies)}


def scores(found: Found, among: Sequence[int]) -> dict[Policy, Score]:
    """Returns the scores over some of the workloads, by their numbers."""
    best = {n: max(points[n].total for points in found.values()) for n in among}
    return {
        policy: Score(
            fmean(points[n].attained[SLO] for n in among),
            geometric_mean(points[n].total / best[n] for n in among),
        )
        for policy, points in found.items()
    }


def policies(scale: Scale, tell: Tell) -> Report:
    """Finds which policy is best, over all kinds of workloads and over some."""
    drawn = workloads(scale)
    found = play_policies(drawn, POLICIES, lambda one: one.lasting(REQUESTS[scale]), tell)
    whole = scores(found, range(len(drawn)))
    first = max(whole, key=lambda policy: whole[policy].in_time)
    kinds = [(f"{kind} memory", "memory", kind) for kind in MEMORIES]
    kinds += [(kind, "load", kind) for kind in LOADS]
    kinds += [(f"phases {kind}", "phases", kind) for kind in PHASES]
    rows = []
    for name, side, kind in kinds:
        among = [n for n, one in enumerate(drawn) if getattr(one, side) == kind]
        if among:
            some = scores(found, among)
            rows.append((name, *(f"{score.in_time:.0%}, {score.throughput:.2f}" for score in some.values())))
    return Report(
        name="policies",
        title=f"{len(drawn)} drawn workloads, on 1, 2 or 4 A100-80 that 2 to 4 LLMs share",
        cells=tuple(
            Cell(row=policy, column=column, paper=None, ours=value)
            for policy, score in whole.items()
            for column, value in (
                (f"% of the requests within {SLO}× of alone", 100 * score.in_time),
                ("throughput over the best policy's", score.throughput),
            )
        ),
        claims=(
            Claim(
                said=f"(not the paper's) the default policy, {DEFAULT_POLICY}, has most requests in time, or "
                f"as many but for {NOISE:.0%}",
                holds=whole[DEFAULT_POLICY].in_time >= whole[first].in_time - NOISE,
                found=f"{whole[DEFAULT_POLICY].in_time:.1%}; {first} has {whole[first].in_time:.1%}",
            ),
        ),
        grids=(
            Grid(
                title=f"Requests within {SLO}× of alone, and throughput over the best policy's, by kind",
                heads=("", *POLICIES),
                rows=tuple(rows),
            ),
        ),
    )


# -- an overload in which quotas bind ---------------------------------------------------------------------

GREEDY: Final = 3.0  # times what the unit answers
MODEST: Final = 0.1
FLOODED: Final[Mapping[Scale, float]] = {"full": 20.0, "small": 2.0}  # seconds


def crowd() -> Drawn:
    """Two LLaMA-7B on one GPU, made for as many requests of each: one is asked for three times what both
    could answer, the other for a tenth."""
    models = (Served("greedy", "7b", 1.0, CHATLMSYS), Served("modest", "7b", 1.0, CHATLMSYS))
    answered = _FLOOD * _estimate(_rated(models, _FLOOD), 1).level
    asked = (replace(models[0], rate=GREEDY * answered), replace(models[1], rate=MODEST * answered))
    return Drawn("some", "overload", "alike", 1, asked, planned=models)


def overload(scale: Scale, tell: Tell) -> Report:
    """Plays a flood of one model's requests, and tells what it costs the other."""
    both = crowd()
    found = play_policies([both], POLICIES, lambda _: FLOODED[scale], tell)
    modest = replace(both, models=both.models[1:])
    rate = modest.models[0].rate
    quiet = modest.play("adbs", FLOODED[scale], lambda _: None)
    rows = [("alone", f"{quiet.answered['modest']:.2f}", duration(quiet.times["modest"].ttft_tail), "–", "–")]
    for policy, (point,) in found.items():
        rows.append(
            (
                policy,
                f"{point.answered['modest']:.2f}",
                duration(point.times["modest"].ttft_tail),
                f"{point.answered['greedy']:.2f}",
                f"{100 * point.blocks['greedy']:.0f} : {100 * point.blocks['modest']:.0f}",
            )
        )
    tails = {policy: point.times["modest"].ttft_tail for policy, (point,) in found.items()}
    return Report(
        name="overload",
        title=f"one of two LLaMA-7B is asked for {GREEDY:g} times what both could answer, on an A100-80",
        claims=(
            Claim(
                said="(not the paper's) quotas keep room for the modest one: its first tokens come sooner "
                "under adbs than under round-robin and fcfs",
                holds=tails["adbs"] <= min(tails["round-robin"], tails["fcfs"]),
                found=", ".join(f"{policy} {duration(tail)}" for policy, tail in tails.items()),
            ),
        ),
        grids=(
            Grid(
                title=f"The modest one is asked for {rate:.2f} req/s. Answers a second, P99 to its first "
                "token, and who has how many of the blocks",
                heads=("policy", "modest, req/s", "TTFT P99", "greedy, req/s", "blocks"),
                rows=tuple(rows),
            ),
        ),
    )


# -- equation 3 -------------------------------------------------------------------------------------------

CASES: Final[Mapping[Scale, int]] = {"full": 50, "small": 3}
_LASTING: Final[Mapping[Scale, float]] = {"full": 30.0, "small": 6.0}
"""The seconds for which requests come; what is answered in the second half of them counts."""
_NEAR: Final = 0.25


def foretold(scale: Scale, tell: Tell) -> Report:
    """Compares what equation 3 says that units answer with what they answer."""
    loads = [*LOADS]
    drawn = [draw("ample", loads[n % len(loads)], PHASES[n % 2], 1000 + n) for n in range(CASES[scale])]
    points = play_policies(drawn, (DEFAULT_POLICY,), lambda _: _LASTING[scale], tell)[DEFAULT_POLICY]
    said = [one.estimate().answered for one in drawn]
    ratios = [sum(point.answered.values()) / one for point, one in zip(points, said, strict=True)]
    rows = []
    for load in loads:
        some = [ratio for ratio, one in zip(ratios, drawn, strict=True) if one.load == load]
        if some:
            rows.append((load, str(len(some)), *(f"{at:.2f}" for at in (min(some), median(some), max(some)))))
    near = sum(abs(ratio - 1) <= _NEAR for ratio in ratios)
    return Report(
        name="section 3.3",
        title="what equation 3 says that a unit answers, and what it answers",
        cells=(
            Cell(
                row=f"{len(ratios)} drawn units",
                column="simulated over predicted",
                paper=None,
                ours=median(ratios),
            ),
            Cell(
                row=f"{len(ratios)} drawn units",
                column="off by, % in the median",
                paper=None,
                ours=100 * median(abs(ratio - 1) for ratio in ratios),
            ),
        ),
        claims=(
            Claim(
                said="the estimator is effective: four fifths of the units within a quarter",
                holds=near >= 0.8 * len(ratios),
                found=f"{near} of {len(ratios)}",
            ),
        ),
        grids=(
            Grid(
                title="Simulated over predicted",
                heads=("load", "units", "least", "median", "most"),
                rows=tuple(rows),
            ),
        ),
    )
