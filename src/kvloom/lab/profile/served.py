"""Requests that come at random moments are answered by the real server and by the simulated one. By the
difference of their times, a profile says how much longer answers take than all else in it tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvloom.config.config import Config
from kvloom.lab.profile.session import Effort
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import hosting_from, measured_units
from kvloom.lab.workload.arrivals import poisson
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.measured import Measured
from kvloom.plan.cost.profile import Profile, ServedSeconds
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program

PROMPT, OUTPUT = 64, 24  # tokens
LOAD: Final = 0.25  # the part of the time for which jobs run, about
FEWEST, MOST = 8, 200  # requests of each model
_ROUNDS: Final = 4  # simulations, each with what the ones before have found


@dataclass(frozen=True, slots=True)
class Answered:
    """Requests, and the median seconds of their answers by model."""

    requests: Sequence[WorkloadRequest]
    first: Mapping[str, float]
    """To the first token."""
    per_token: Mapping[str, float]
    """Of each further one."""

    @staticmethod
    def of(requests: Sequence[WorkloadRequest], results: Results) -> Answered:
        tallies = results.models.items()
        return Answered(
            requests,
            {name: tally.first.p50 for name, tally in tallies if tally.first is not None},
            {name: tally.per_token.p50 for name, tally in tallies if tally.per_token is not None},
        )


def random_requests(cost: Measured, models: Sequence[str], effort: Effort) -> list[WorkloadRequest]:
    """Returns requests that come at random moments, for each model as many in turn, over about as many
    seconds as `effort` has for them."""
    steps = [cost.seconds(Work.decode(model, 1.0, [PROMPT])) + cost.between(1) for model in models]
    prefills = [cost.seconds(Work.prefill(model, 1.0, [PROMPT])) for model in models]
    gap = (sum(prefills) + (OUTPUT - 1) * sum(steps)) / len(models) / LOAD
    each = max(FEWEST, min(MOST, round(effort.random_seconds / gap / len(models))))
    moments = gap * np.cumsum(poisson(np.random.default_rng(0), each * len(models)))
    return [
        WorkloadRequest(at=float(at), model=models[number % len(models)], prompt=PROMPT, output=OUTPUT)
        for number, at in enumerate(moments)
    ]


def served_seconds(config: Config, profile: Profile, real: Answered) -> tuple[ServedSeconds, ...]:
    """Returns how much longer than `profile` says answers take, so that simulated ones take about as long in
    the median as the real ones, or longer if the profile alone says so already. `profile` must already
    contain `hosted`."""
    first, step = defaultdict[str, float](float), defaultdict[str, float](float)
    served: tuple[ServedSeconds, ...] = ()
    for _ in range(_ROUNDS):
        ours = simulated_answers(config, replace(profile, served=served), real)
        for late, wanted, had in ((first, real.first, ours.first), (step, real.per_token, ours.per_token)):
            for model in wanted:
                late[model] = max(0.0, late[model] + wanted[model] - had[model])
        served = tuple(
            ServedSeconds(model=model, first=first[model], step=step[model]) for model in sorted(first | step)
        )
    return served


def simulated_answers(config: Config, profile: Profile, load: Answered) -> Answered:
    """Returns what the simulation says of a load, with the client on the machine too."""
    units = measured_units(config, profile)
    results = simulate(
        units,
        load_program(config.program.name, config.program.options),
        load.requests,
        Prompts(min(shape.vocab for unit in units for shape in unit.shapes.values())),
        Summary({}),
        title="",
        hosting=hosting_from(profile),
        client_here=True,
        patience=config.patience,
    )
    return Answered.of(load.requests, results)
