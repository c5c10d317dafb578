"""Requests that come at random moments are answered by the real server and by the simulated one. By the
difference of their times, a profile says how much longer answers take than all else in it tells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvloom.config.config import Config
from kvloom.lab.sim.fleet import rescheduling_of
from kvloom.lab.sim.run import simulate
from kvloom.lab.sim.unit import cpu_costs_from, measured_units
from kvloom.lab.workload.arrivals import poisson
from kvloom.lab.workload.request import Prompts, WorkloadRequest
from kvloom.lab.workload.results import Results
from kvloom.lab.workload.summary import Summary
from kvloom.plan.cost.measured import Measured
from kvloom.plan.cost.profile import Calibration, Profile
from kvloom.plan.cost.work import Work
from kvloom.router.program import load_program

FEWEST, MOST = 4, 200  # requests of each model
CLOSE: Final = 0.01  # the part by which simulated times may differ, so that nothing is added without need
_HALVINGS: Final = 6  # of the range in which a number is looked for
_ROUNDS: Final = 2  # of searches, each with what the ones before have found


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at random moments, with prompts and answers of so many tokens. busy: the part of the
    time for which jobs would run if each had one sequence; more than 1 if they are to run together."""

    busy: float
    output: int
    prompt: int = 64

    def requests(self, cost: Measured, bounds: Mapping[str, Bounds], seconds: float) -> list[WorkloadRequest]:
        """Returns about so many seconds of requests, of each model as many in turn. bounds: those of each
        model."""
        context = min(bound.context for bound in bounds.values())
        prompt = max(1, min(self.prompt, context // 2))
        output = min(self.output, context - prompt)
        jobs = [Work.decode(model, 1.0, [prompt]) for model in bounds] * (output - 1)
        jobs += [Work.prefill(model, 1.0, [prompt]) for model in bounds]
        gap = sum(cost.seconds(job) + cost.between(job) for job in jobs) / len(bounds) / self.busy
        most = min(bound.waiting for bound in bounds.values())
        each = min(most, MOST, max(FEWEST, round(seconds / gap / len(bounds))))
        moments = (gap * np.cumsum(poisson(np.random.default_rng(0), each * len(bounds)))).tolist()
        return [
            WorkloadRequest(at=at, model=model, prompt=prompt, output=output)
            for at, model in zip(moments, itertools.cycle(bounds), strict=False)
        ]


class Bounds(NamedTuple):
    """What a load may ask of a model at most: the tokens of one request, and the requests that may wait."""

    context: int
    waiting: int


USUAL: Final = Load(0.5, 24)
"""The load by which the way to the first token is found."""
HEAVY: Final = Load(2.0, 80)
"""That by which a job's time for a row is found: the one with most sequences at a time."""
LONG: Final = Load(1.2, 24, prompt=256)
"""That by which a job's time for a token of a prompt is found: the one with most of them."""
LOADS: Final = (USUAL, Load(0.25, 2), Load(0.25, 80), Load(1.2, 24), HEAVY, LONG)
"""Loads by which the costs of a request, of tokens of prompts and answers, and of a turn can be told apart:
few sequences at a time, and many."""


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


def calibrate(config: Config, profile: Profile, answered: Mapping[Load, Answered]) -> Profile:
    """Returns the profile with what it takes for simulated answers to be as long as the real ones were, which
    are by load. `profile` must already contain `overheads`."""
    profile = replace(profile, calibrated=(), closing=0.0)
    profile = _with_jobs(config, profile, answered[HEAVY], answered[LONG])
    return _with_first(config, _with_closing(config, profile, answered[USUAL]), answered[USUAL])


def _with_jobs(config: Config, profile: Profile, heavy: Answered, long: Answered) -> Profile:
    """Finds the seconds that a job takes longer for each row that it decodes and for each token of a prompt,
    so that answers take as long a token under both loads as they did. If `long` has no longer prompts than
    `heavy`, because the context is short, the two cannot be told apart, and rows have all of it."""
    cost, models = Measured(profile), list(heavy.first)
    tokens, fewer = (load.requests[0].prompt for load in (long, heavy))
    most_row = max(cost.seconds(Work.decode(model, 1.0, [tokens])) for model in models) / 2
    most_prompt = max(cost.seconds(Work.prefill(model, 1.0, [tokens])) for model in models) / tokens / 2

    def with_both(row: float, prompt: float) -> Profile:
        rows = (Calibration(model=model, first=0.0, row=row, prompt=prompt) for model in models)
        return replace(profile, calibrated=tuple(rows))

    def late(load: Answered, row: float, prompt: float) -> bool:
        ours = simulated_answers(config, with_both(row, prompt), load)
        return _over(ours.per_token, load.per_token) > -CLOSE

    row = prompt = 0.0
    for _ in range(_ROUNDS):
        row = _last_before(partial(late, heavy, prompt=prompt), most_row)
        prompt = _last_before(partial(late, long, row), most_prompt) if tokens > fewer else 0.0
    return with_both(row, prompt)


def _with_closing(config: Config, profile: Profile, usual: Answered) -> Profile:
    """Finds the part of a request's CPU time that comes after its answer, so that first tokens come as early
    under this load as they did."""

    def early(closing: float) -> bool:
        ours = simulated_answers(config, replace(profile, closing=closing), usual)
        return _over(ours.first, usual.first) < CLOSE

    return replace(profile, closing=_last_before(early, 1.0))


def _with_first(config: Config, profile: Profile, usual: Answered) -> Profile:
    """Finds the seconds by which first tokens come still later under this load than simulated."""
    for _ in range(_ROUNDS):
        ours = simulated_answers(config, profile, usual)
        rows = (
            replace(row, first=max(0.0, row.first + usual.first[row.model] - ours.first[row.model]))
            for row in profile.calibrated
        )
        profile = replace(profile, calibrated=tuple(rows))
    return profile


def _last_before(reached: Callable[[float], bool], most: float) -> float:
    """Returns about the largest number from 0 to `most` for which `reached` does not hold yet."""
    least = 0.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if reached(middle) else (middle, most)
    return least


def _over(ours: Mapping[str, float], real: Mapping[str, float]) -> float:
    """Returns the logarithm of simulated seconds over real ones, in the mean over the models; 0 if there are
    none."""
    return 0.0 if not real else fmean(math.log(ours[model] / real[model]) for model in real)


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
        cpu_costs=cpu_costs_from(profile),
        client_here=True,
        rescheduling=rescheduling_of(config),
        patience=config.patience,
    )
    return Answered.of(load.requests, results)
