"""Requests that come at random moments are answered by the real server and by the simulated one. By the
difference of their times, a profile says how much longer served jobs take than those that are repeated."""

from __future__ import annotations

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
from kvloom.plan.cost.profile import Profile, ServedJobs
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program
from kvloom.types.job import Phase

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


def served_jobs(config: Config, profile: Profile, real: Answered) -> tuple[ServedJobs, ...]:
    """Returns how much longer than `profile` says jobs take, so that simulated answers take as long in the
    median as the real ones. The excess of prefills comes from times to first token, that of decode steps from
    times per further token. `profile` must already contain `hosted`."""
    found: dict[tuple[str, Phase], float] = {}
    for _ in range(_ROUNDS):
        ours = simulated_answers(config, replace(profile, served=_rows(found)), real)
        for phase, wanted, had in (
            (Phase.DECODE, real.per_token, ours.per_token),
            (Phase.PREFILL, real.first, ours.first),
        ):
            for model in wanted:
                found[model, phase] = found.get((model, phase), 0.0) + wanted[model] - had[model]
    return _rows(found)


def _rows(found: Mapping[tuple[str, Phase], float]) -> tuple[ServedJobs, ...]:
    return tuple(
        ServedJobs(model=model, phase=phase, seconds=seconds)
        for (model, phase), seconds in sorted(found.items())
    )


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
