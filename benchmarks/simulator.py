"""How fast the simulator is: 16 LLaMA-7B on an A10 each, 10,000 requests of ShareGPT's lengths.

python -m benchmarks.simulator [--requests 10000]. CPU time of this process, so that neighbours on the machine
do not count. Requests come by Poisson at 8 a second to all of them together, and go to the least loaded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.lab.sim.fleet import ReschedulingSettings
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import planned_units
from kvloom.lab.workload.make import make_requests
from kvloom.lab.workload.request import Prompts
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.spec import WorkloadSpec
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.devices import find_device
from kvloom.plan.cost.shapes import find_shape
from kvloom.plan.plan import PlacementPlan, PlannedModel, PlannedUnit
from kvloom.router.program import load_program
from kvloom.types.spec import Policy

POLICIES: tuple[Policy, ...] = ("fcfs", "adbs")
INSTANCES, REQUESTS, RATE = 16, 10_000, 8.0
MODEL, SHAPE, DEVICE = "chat", "llama-7b", "A10"
PROMPT, OUTPUT = 161.0, 338.0  # tokens on average, of ShareGPT (MuxServe, section 4.1)
USED = 0.9  # of a device's memory, by weights and the pool
MOST, AIM = 60.0, 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Run:
    policy: Policy
    seconds: float
    results: Results


def fleet() -> PlacementPlan:
    shape, device = find_shape(SHAPE), find_device(DEVICE)
    model = PlannedModel(
        name=MODEL,
        path=None,
        shape=shape,
        rate=RATE / INSTANCES,
        prompt=PROMPT,
        output=OUTPUT,
        prefill_share=1.0,
        decode_share=1.0,
        quota=1.0,
        throughput=RATE / INSTANCES,
    )
    pool = int(USED * device.memory) - shape.parameters * shape.itemsize
    units = tuple(
        PlannedUnit(
            name=f"unit-{i}", node=f"node-{i}", device=device.name, gpus=1, kv_bytes=pool, models=(model,)
        )
        for i in range(INSTANCES)
    )
    return PlacementPlan(units=units, throughput=RATE, made_by="benchmarks.simulator")


def play(policy: Policy, requests: int) -> Run:
    spec = WorkloadSpec.model_validate(
        {"models": [MODEL], "rate": RATE, "requests": requests, "lengths": "sharegpt"}
    )
    began = time.process_time()
    results = simulate(
        planned_units(fleet(), policy),
        load_program("least_loaded"),
        make_requests(spec),
        Prompts(find_shape(SHAPE).vocab),
        Summary(),
        title=policy,
        rescheduling=ReschedulingSettings(),  # as `kvloom simulate` does if units of a plan share a model
    )
    if results.total.errors:
        raise RuntimeError(f"{policy}: {results.total.errors} errors: {results.errors}")
    return Run(policy, time.process_time() - began, results)


def measure(requests: int = REQUESTS) -> Report:
    machine = this_machine()
    runs = [play(policy, requests) for policy in POLICIES]
    return Report(
        name="simulator",
        title=f"{requests:,} requests to {INSTANCES} simulated {DEVICE}",
        columns=["", "CPU s", "simulated s", "tokens", "tokens a CPU s", "CPU ms a request"],
        rows=[_row(run) for run in runs],
        findings=[
            Finding(
                what=f"CPU, {run.policy} (aim {AIM:g} s for {REQUESTS:,})",
                value=run.seconds,
                unit=" s",
                most=MOST if requests == REQUESTS else None,
            )
            for run in runs
        ],
        machine=machine,
    )


def _row(run: Run) -> list[Cell]:
    total = run.results.total
    tokens, each = total.output_tokens, 1e3 * run.seconds / total.requests
    return [run.policy, run.seconds, run.results.seconds, tokens, tokens / run.seconds, each]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    publish(measure(parser.parse_args().requests))


if __name__ == "__main__":
    main()
