"""Requests in time under each batching policy: the four models of `benchmarks.multimodel` in virtual time.

python -m benchmarks.deadlines PROFILE [--pace 1.8] [--rates 3 6] [--seeds 0 1 2]

PROFILE: of a1, a2 (shape A), b1 and b2 (shape B), by `kvloom profile --model a1=... -o PROFILE`. `--pace`
makes each job so many times quicker: a profile of a busy machine is slow. A model's objective is 8 times what
the longest prompt takes alone, and 8 times a lone step. In time by `slo` is who keeps it; by `8 × alone`, who
ends within 8 times what the request takes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.multimodel import ALPHA, OUTPUTS, POLICIES, SCALE, SHAPES
from benchmarks.workload import PROMPTS, poisson, power_law
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import SimulatedUnit
from kvloom.lab.workload.request import Prompts, RequestResult, Within, WorkloadRequest
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.measured import ProfiledCostModel
from kvloom.plan.cost.profile import Profile, read_profile
from kvloom.plan.cost.work import CostModel, Work
from kvloom.router.program import load_program
from kvloom.types.spec import EngineSpec, ModelSpec, Policy, Slo

BLOCK, POOL, CONTEXT, VOCAB = 16 << 10, 1 << 30, 1024, 8192
MIDDLE: Final = 160  # tokens that a stream holds on the whole


@dataclass(frozen=True, slots=True)
class Paced:
    """A cost model whose jobs are `pace` times as quick as measured."""

    cost: CostModel
    pace: float

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        return self.cost.seconds(work, beside) / self.pace

    def alone(self, ask: WorkloadRequest) -> float:
        """Returns what a request takes that has the unit to itself."""
        step = self.seconds(Work.decode(ask.model, 1.0, [ask.prompt + ask.output // 2]))
        return self.seconds(Work.prefill(ask.model, 1.0, [ask.prompt])) + (ask.output - 1) * step


def objective(model: str, cost: Paced) -> Slo:
    ttft = SCALE * cost.seconds(Work.prefill(model, 1.0, [max(PROMPTS)]))
    return Slo(ttft, SCALE * cost.seconds(Work.decode(model, 1.0, [MIDDLE])))


def in_time(
    policy: Policy, profile: Profile, pace: float, rate: float, seconds: float, seed: int
) -> list[int]:
    """Returns how many requests there were, and how many were in time by both measures."""
    cost = Paced(ProfiledCostModel(profile), pace)
    slos = {name: objective(name, cost) for name in SHAPES}
    spec = EngineSpec(
        models=tuple(ModelSpec(name=name, path="", max_context=CONTEXT, slo=slos[name]) for name in SHAPES),
        kv_bytes=POOL,
        block_bytes=BLOCK,
        policy=policy,
        max_running=256,
        max_waiting=1024,
        chunk_tokens=512,
        threads=profile.cores,
    )
    unit = SimulatedUnit(spec, {name: profile.shapes[name] for name in SHAPES}, profile.cores, cost)
    asks = [
        WorkloadRequest(at=ask.at, model=ask.model, prompt=len(ask.prompt), output=ask.output)
        for ask in poisson(power_law(list(SHAPES), ALPHA, rate), seconds, OUTPUTS, seed)
    ]
    results: list[RequestResult] = []
    program = load_program("data_parallel", {})
    simulate([unit], program, asks, Prompts(VOCAB, seed), Summary(), title=policy, tell=results.append)
    kept = [Within(slos[one.request.model].ttft, slos[one.request.model].tpot)(one) for one in results]
    ended = [(one.end or 0.0) <= SCALE * cost.alone(one.request) for one in results]
    good = [not one.error for one in results]
    return [len(results), sum(map(min, kept, good)), sum(map(min, ended, good))]


def table(
    profile: Profile, pace: float, rates: Sequence[float], seconds: float, seeds: Sequence[int]
) -> Table:
    found = Table(title=f"In time, of {len(seeds)} × {seconds:g} s, pace {pace:g}", title_justify="left")
    for head in ("", "req/s asked", "requests", "by slo", f"by {SCALE:g} × alone"):
        found.add_column(head, justify="right" if head else "left")
    for rate in rates:
        for policy in POLICIES:
            runs = [in_time(policy, profile, pace, rate, seconds, seed) for seed in seeds]
            count, *met = (sum(column) for column in zip(*runs, strict=True))
            found.add_row(policy, f"{rate:g}", str(count), *(f"{one} ({one / count:.0%})" for one in met))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--rates", nargs="+", type=float, default=[3.0, 6.0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    profile = read_profile(options.profile)
    Console().print(table(profile, options.pace, options.rates, options.seconds, options.seeds))


if __name__ == "__main__":
    main()
