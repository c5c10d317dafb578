"""Requests that arrive at random at a low load are answered by the real server and by the simulated one. The
difference of their times to first tokens is what a served prefill takes longer than one that is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvloom.config.config import Config
from kvloom.lab.profile.session import Effort
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import measured_hosting, measured_units
from kvloom.lab.workload.arrivals import poisson
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.measured import Measured
from kvloom.plan.cost.profile import Profile
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program

PROMPT, OUTPUT = 64, 24  # tokens
LOAD: Final = 0.25  # the part of the time for which jobs run, about
FEWEST, MOST = 8, 200  # requests of each model
_ROUNDS: Final = 3  # simulations, each with what the ones before have found


def staggered_requests(cost: Measured, models: Sequence[str], effort: Effort) -> list[WorkloadRequest]:
    """Returns requests that come at random moments, for each model as many in turn, over about as many
    seconds as `effort` has for them."""
    steps = [cost.seconds(Work.decode(model, 1.0, [PROMPT])) + cost.between(1) for model in models]
    prefills = [cost.seconds(Work.prefill(model, 1.0, [PROMPT])) for model in models]
    gap = (sum(prefills) + (OUTPUT - 1) * sum(steps)) / len(models) / LOAD
    each = max(FEWEST, min(MOST, round(effort.staggered_seconds / gap / len(models))))
    moments = gap * np.cumsum(poisson(np.random.default_rng(0), each * len(models)))
    return [
        WorkloadRequest(at=float(at), model=models[number % len(models)], prompt=PROMPT, output=OUTPUT)
        for number, at in enumerate(moments)
    ]


def cold_seconds(
    config: Config, profile: Profile, requests: Sequence[WorkloadRequest], first: Mapping[str, float]
) -> dict[str, float]:
    """Returns by model how much longer a prefill takes than `profile` says, so that simulated first tokens
    take as long in the median as the real ones. profile: with what is no job. first: the real medians."""
    found = dict.fromkeys(first, 0.0)
    for _ in range(_ROUNDS):
        simulated = simulated_first_tokens(config, replace(profile, cold=found), requests)
        found = {model: max(0.0, found[model] + first[model] - simulated[model]) for model in first}
    return found


def simulated_first_tokens(
    config: Config, profile: Profile, requests: Sequence[WorkloadRequest]
) -> dict[str, float]:
    """Returns the simulated median seconds to first tokens by model, with the client on the machine too."""
    units = measured_units(config, profile)
    results = simulate(
        units,
        load_program(config.program.name, config.program.options),
        requests,
        Prompts(min(shape.vocab for unit in units for shape in unit.shapes.values())),
        Summary({}),
        title="",
        hosting=measured_hosting(profile),
        client_here=True,
        patience=config.patience,
    )
    return first_tokens(results)


def first_tokens(results: Results) -> dict[str, float]:
    """Returns the median seconds to first tokens by model."""
    return {name: tally.first.p50 for name, tally in results.models.items() if tally.first is not None}
