"""Requests that come at random moments are answered by the real server and by the simulated one. By the
difference of their times, a profile says how much longer answers take than all else in it tells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvloom.config.config import Config
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

PROMPT: Final = 64  # tokens
FEWEST, MOST = 4, 200  # requests of each model
_HALVINGS: Final = 6  # of the range in which a number is looked for
_ROUNDS: Final = 3  # simulations, each with what the ones before have found


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at random moments, with answers of `output` tokens. busy: the part of the time for
    which jobs would run if each had one sequence; more than 1 if they are to run together."""

    busy: float
    output: int

    def requests(self, cost: Measured, models: Sequence[str], seconds: float) -> list[WorkloadRequest]:
        """Returns about so many seconds of requests, of each model as many in turn."""
        jobs = [Work.decode(model, 1.0, [PROMPT]) for model in models] * (self.output - 1)
        jobs += [Work.prefill(model, 1.0, [PROMPT]) for model in models]
        gap = sum(cost.seconds(job) + cost.between(job) for job in jobs) / len(models) / self.busy
        each = max(FEWEST, min(MOST, round(seconds / gap / len(models))))
        moments = (gap * np.cumsum(poisson(np.random.default_rng(0), each * len(models)))).tolist()
        return [
            WorkloadRequest(at=at, model=model, prompt=PROMPT, output=self.output)
            for at, model in zip(moments, itertools.cycle(models), strict=False)
        ]


USUAL: Final = Load(0.5, 24)
"""The load by which the way to the first token is found."""
HEAVY: Final = Load(2.0, 80)
"""That by which a job's time for a sequence is found: the one with most sequences at a time."""
LOADS: Final = (USUAL, Load(0.25, 2), Load(0.25, 80), Load(1.2, 24), HEAVY)
"""Loads by which the costs of a request, a token and a turn can be told apart, few and many sequences at a
time."""


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


def with_served(config: Config, profile: Profile, usual: Answered, heavy: Answered) -> Profile:
    """Returns the profile with what it takes for simulated answers to be as long as the real ones were. If
    they are later even without it, nothing is added. `profile` must already contain `hosted`."""
    profile = replace(profile, served=(), closing=0.0)
    profile = _with_sequences(config, profile, heavy)
    return _with_first(config, _with_closing(config, profile, usual), usual)


def _with_sequences(config: Config, profile: Profile, heavy: Answered) -> Profile:
    """Finds the seconds that a job takes longer for each sequence that it decodes, so that answers take as
    long a token under this load as they did."""
    cost, models = Measured(profile), list(heavy.first)

    def tried(seconds: float) -> Profile:
        served = (ServedSeconds(model=model, first=0.0, sequence=seconds) for model in models)
        return replace(profile, served=tuple(served))

    def late(seconds: float) -> bool:
        return _later(simulated_answers(config, tried(seconds), heavy).per_token, heavy.per_token)

    most = max(cost.seconds(Work.decode(model, 1.0, [PROMPT])) for model in models) / 2
    return tried(_last_before(late, most))


def _with_closing(config: Config, profile: Profile, usual: Answered) -> Profile:
    """Finds the part of a request's CPU time that comes after its answer, so that first tokens come as early
    under this load as they did."""

    def early(closing: float) -> bool:
        ours = simulated_answers(config, replace(profile, closing=closing), usual)
        return not _later(ours.first, usual.first)

    return replace(profile, closing=_last_before(early, 1.0))


def _with_first(config: Config, profile: Profile, usual: Answered) -> Profile:
    """Finds the seconds by which first tokens come still later under this load than simulated."""
    for _ in range(_ROUNDS):
        ours = simulated_answers(config, profile, usual)
        served = (
            replace(row, first=max(0.0, row.first + usual.first[row.model] - ours.first[row.model]))
            for row in profile.served
        )
        profile = replace(profile, served=tuple(served))
    return profile


def _last_before(reached: Callable[[float], bool], most: float) -> float:
    """Returns about the largest number from 0 to `most` for which `reached` does not hold yet."""
    least = 0.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if reached(middle) else (middle, most)
    return least


def _later(ours: Mapping[str, float], real: Mapping[str, float]) -> bool:
    """Returns whether simulated seconds are more than the real ones, in the mean of their logarithms."""
    return sum(math.log(ours[model] / real[model]) for model in real) > 0.0


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
