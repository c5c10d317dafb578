"""Predicts how long a job takes by what was measured on this machine."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from msgspec.structs import replace

from kvloom.plan.cost.fit import Curve, Spread
from kvloom.plan.cost.profile import Colocated, EngineStep, Profile, Timed, TimedMixed
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import MOST_PARTS, Operator, Work, layer_parts
from kvloom.types.errors import ConfigError
from kvloom.types.job import Phase

FOLDS: Final = 5

Kind = tuple[str, bool]  # a model, and whether the job is a decode step


class _CurvesByCores:
    """The times of one kind of job on any number of cores: there is a curve for each number that was
    measured, and between two of them a power of the cores joins both."""

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        self._cores = sorted(curves)
        self._curves = [curves[cores] for cores in self._cores]

    def seconds(self, cores: float, work: Work) -> float:
        x, *others = _features(work)
        above = bisect_left(self._cores, cores - 1e-9)
        if above == len(self._cores):
            return self._curves[-1].seconds(x, *others)
        high, many = self._cores[above], self._curves[above].seconds(x, *others)
        if above == 0 or high <= cores + 1e-9:  # fewer cores than were measured, or just as many
            return many * max(1.0, high / cores)
        low, few = self._cores[above - 1], self._curves[above - 1].seconds(x, *others)
        part = math.log(cores / low) / math.log(high / low)
        return float(few ** (1.0 - part) * many**part)


class ProfiledCostModel:
    """Satisfies `OperatorCostModel`. `cores` is the number that the unit has; by default it has all of the
    profile's.

    A prefill takes f(tokens) + a · pairs + b · context + c · sequences, a decode step f(sequences) + a ·
    context, fitted for each model and number of cores to what was measured. A decode step's time is
    multiplied by a factor of its model: that under an engine, where one step follows the other, over the
    fitted one, in the median. A mixed job takes what the prefill and the decode step in it take one after the
    other, less a decode step of one empty sequence, because the weights are read once for both, times another
    such factor. Factors are 1 if nothing was measured. Beside others a job is slowed by the measured slowdown
    of each pair, scaled by the other's share; if the shares exceed the whole, by their sum as well.

    Operators were not measured. Attention is what a job takes longer for its pairs and its context; the rest
    is spread over the products by the weights that they read. Launch and poll times are 0: they are contained
    in the measured seconds, or too small to count.
    """

    start: Final = 0.0
    poll: Final = 0.0

    def __init__(self, profile: Profile, cores: int | None = None) -> None:
        self._cores = cores or profile.cores
        self._curves_of = _fit_all(profile)
        self._colocation = _colocation(profile.colocated, profile.cores, profile.shapes)
        self._step_gaps = _step_gaps(profile)
        self._prefill_gaps = {row.model: row.gap for row in profile.prefill_gaps}
        self._shapes = profile.shapes
        self._stepping: dict[str, float] = {}  # the factors are found with none of them
        self._stepping = self._stepping_factors(profile.steps, profile.cores / self._cores)
        self._mixing = self._mixing_factors(profile.mixed)

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        kind = work.model, work.phase is Phase.DECODE
        alone = self._alone(work)
        if not beside:
            return alone
        together, slower = work.share, 1.0
        for other in beside:
            together += other.share
            rate = self._colocation.get((kind, (other.model, other.phase is Phase.DECODE)), 0.0)
            slower += rate * other.share
        return alone * slower * max(1.0, together)

    def _alone(self, work: Work) -> float:
        if work.phase is Phase.MIXED:
            return self._together(work.prompts, work.step) * self._mixing.get(work.model, 1.0)
        curves = self._curves_of.get((work.model, work.phase is Phase.DECODE))
        if curves is None:
            known = sorted({model for model, _ in self._curves_of})
            raise ConfigError(f"model {work.model!r} was not measured; {', '.join(known)} were")
        factor = self._stepping.get(work.model, 1.0) if work.phase is Phase.DECODE else 1.0
        return factor * curves.seconds(work.share * self._cores, work)

    def _together(self, prompts: Work, step: Work) -> float:
        """Returns the seconds of both, one after the other, if the weights are read once for both."""
        read = self._alone(Work.decode(step.model, step.share, (0,)))
        return self._alone(prompts) + self._alone(step) - read

    def _stepping_factors(self, steps: Iterable[EngineStep], share: float) -> dict[str, float]:
        """Returns by model how many times as long decode steps took under an engine, one after the other, as
        those that were measured alone. share: that of their cores, in this unit's."""
        seen: dict[str, list[float]] = defaultdict(list)
        for step in steps:
            contexts = [step.context // step.sequences] * step.sequences
            alone = self._alone(Work.decode(step.model, share, contexts))
            seen[step.model].append(step.step / alone)
        return {model: median(factors) for model, factors in seen.items()}

    def _mixing_factors(self, mixed: Iterable[TimedMixed]) -> dict[str, float]:
        """Returns by model how many times as long mixed jobs took as their parts together."""
        seen: dict[str, list[float]] = defaultdict(list)
        for timed in mixed:
            together = self._together(timed.prompts.work(self._cores), timed.step.work(self._cores))
            seen[timed.step.model].append(median(timed.seconds) / together)
        return {model: median(factors) for model, factors in seen.items()}

    def factors(self, model: str) -> tuple[float, float]:
        """Returns the factors of a model's decode steps and of its mixed jobs."""
        return self._stepping.get(model, 1.0), self._mixing.get(model, 1.0)

    def shape(self, model: str) -> ModelShape:
        return self._shapes[model]

    def operators(self, work: Work) -> tuple[Operator, ...]:
        shape, whole = self._shapes[work.model], self.seconds(work)
        products = self.seconds(replace(work, pairs=0, context=0, held=0))
        parts = [part for part in layer_parts(shape, shape.experts) if part.read or part.name == "attention"]
        head = shape.vocab * shape.hidden
        each = products / (shape.layers * sum(part.read for part in parts) + head)
        attention = (whole - products) / shape.layers
        times = [(part.name, part.read * each if part.read else attention) for part in parts]
        found = [Operator(name, seconds, shape.layers, MOST_PARTS) for name, seconds in times]
        return (*found, Operator("head", head * each, 1, MOST_PARTS))

    def queued(self, work: Work) -> float:
        """Returns the job's own seconds, because it is issued as one."""
        return self.seconds(work)

    def attention(self, model: str, shape: ModelShape, rows: int, context: int) -> float:
        """Returns the seconds of attention of a model that this machine was measured with."""
        step = Work(model, Phase.DECODE, 1.0, rows, rows, rows, rows + context, context)
        return (self.seconds(step) - self.seconds(replace(step, context=0))) / shape.layers

    def engine_gap(self, work: Work) -> float:
        """Returns the seconds of the engine's own work for a job: from its result to the next launch, and, if
        it has prompts, what these cost before its launch and after its result. 0 if that was not measured."""
        prefill = 0.0 if work.phase is Phase.DECODE else self._prefill_gaps.get(work.model, 0.0)
        return self.step_gap(work.batch) + prefill

    def step_gap(self, sequences: int) -> float:
        """Returns likewise the seconds after a decode step of so many sequences."""
        return self._step_gaps.seconds(sequences, 0.0, 0.0, 0.0) if self._step_gaps else 0.0


def cross_validate(profile: Profile) -> dict[str, Spread]:
    """Returns the spread of the prediction error by '<model>, <phase>', and over all jobs under 'all'. Each
    job is predicted by a fit that has not seen it."""
    order = random.Random(0).sample(profile.jobs, len(profile.jobs))
    order.sort(key=lambda timed: (timed.job.model, timed.job.phase, timed.job.cores))  # even folds
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fold in range(FOLDS):
        seen = tuple(timed for i, timed in enumerate(order) if i % FOLDS != fold)
        alone = replace(profile, jobs=seen, steps=())  # no factor: they were measured alone
        model = ProfiledCostModel(alone)
        for timed in order[fold::FOLDS]:
            job = timed.job
            pair = model.seconds(job.work(profile.cores)), median(timed.seconds)
            for key in (f"{job.model}, {job.phase.value}", "all"):
                found[key].append(pair)
    return {key: Spread.of(*zip(*pairs, strict=True)) for key, pairs in sorted(found.items())}


def _features(work: Work) -> tuple[float, float, float, float]:
    """Returns the inputs of a curve."""
    if work.phase is Phase.DECODE:
        return work.batch, work.context, 0.0, 0.0
    return work.tokens, work.pairs, work.context, work.batch


def _fit_all(profile: Profile) -> dict[Kind, _CurvesByCores]:
    """Fits all phases of all models. Raises ConfigError if a phase of a model was not measured."""
    groups: dict[Kind, dict[int, list[Timed]]] = {
        (model, decode): {} for model in profile.shapes for decode in (False, True)
    }
    for timed in profile.jobs:
        kind = timed.job.model, timed.job.phase is Phase.DECODE
        groups[kind].setdefault(timed.job.cores, []).append(timed)
    return {kind: _CurvesByCores(_curves(kind, of_cores)) for kind, of_cores in groups.items()}


def _curves(kind: Kind, groups: Mapping[int, Sequence[Timed]]) -> dict[int, Curve]:
    if not groups:
        phase = Phase.DECODE if kind[1] else Phase.PREFILL
        raise ConfigError(f"no {phase.value} of {kind[0]} was measured; `kvloom profile` measures it")
    curves = {}
    for cores, group in groups.items():
        rows = [_features(timed.job.work(cores)) for timed in group]
        seconds = [median(timed.seconds) for timed in group]
        curves[cores] = Curve.fit([x for x, *_ in rows], [others for _, *others in rows], seconds)
    return curves


def _colocation(
    colocated: Iterable[Colocated], cores: int, models: Iterable[str]
) -> dict[tuple[Kind, Kind], float]:
    """Returns how many times longer, less one, a job takes beside another with all of the cores: by both
    kinds, and for models that were not measured together as others were on average."""
    seen: dict[tuple[Kind, Kind], list[float]] = defaultdict(list)
    phases: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    for pair in colocated:
        one, other = [(job.model, job.phase is Phase.DECODE) for job in (pair.job, pair.beside)]
        rate = max(0.0, pair.seconds / pair.alone - 1.0) * cores / pair.beside.cores
        seen[one, other].append(rate)
        phases[one[1], other[1]].append(rate)
    kinds = [(model, decode) for model in models for decode in (False, True)]
    rates = {}
    for one, other in itertools.product(kinds, repeat=2):
        known = seen.get((one, other)) or phases.get((one[1], other[1]))
        if known:
            rates[one, other] = median(known)
    return rates


def _step_gaps(profile: Profile) -> Curve | None:
    if not profile.steps:
        return None
    counts = [step.sequences for step in profile.steps]
    return Curve.fit(counts, [(0.0, 0.0, 0.0)] * len(counts), [step.gap for step in profile.steps])
