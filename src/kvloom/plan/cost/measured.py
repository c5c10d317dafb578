"""Predicts how long a job takes by what was measured on this machine."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvloom.plan.cost.profile import Crowded, JobMeasured, Profile, Role, Timed
from kvloom.plan.cost.shapes import ModelShape
from kvloom.plan.cost.work import MOST_PARTS, Operator, Work, layer_parts
from kvloom.types.errors import ConfigError
from kvloom.types.geometry import F64
from kvloom.types.job import Phase

_EASY: Final = 0.05  # errors beyond it count by their size, not its square: outliers do not decide
_REWEIGHTED: Final = 8


def fit_positive(features: F64, seconds: F64) -> F64:
    """Returns the coefficients ≥ 0 [C] for which features [R, C] @ coefficients comes nearest to seconds [R]:
    by the ratio, with weights that tame outliers."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0.0] = 1.0
    ratios = features / scale / seconds[:, None]
    weights = np.ones(len(seconds))
    for _ in range(_REWEIGHTED):
        found = _least_squares(ratios * weights[:, None], weights)
        weights = ((ratios @ found - 1.0) ** 2 + _EASY**2) ** -0.25
    coefficients: F64 = found / scale
    return coefficients


def _least_squares(a: F64, b: F64) -> F64:
    """Returns x ≥ 0 for which a @ x is nearest to b: the active set method of Lawson and Hanson (Solving
    Least Squares Problems, 1974, chapter 23)."""
    out, held = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)  # held: those that may be more than 0
    for _ in range(3 * a.shape[1]):
        gain = np.where(held, -np.inf, a.T @ (b - a @ out))
        if gain.max(initial=-np.inf) <= 1e-9:
            break
        held[gain.argmax()] = True
        while True:
            best = np.zeros_like(out)
            best[held] = np.linalg.lstsq(a[:, held], b, rcond=None)[0]
            falling = held & (best <= 0.0)
            if not falling.any():
                break
            way = (out[falling] / (out[falling] - best[falling])).min()
            out = out + way * (best - out)
            held &= out > 1e-12
            out[~held] = 0.0
        out = best
    return out


class Curve:
    """A curve seconds(x, a, b, c) = f(x) + k·(a, b, c), in which f is linear between knots. f never falls and
    no k is negative, so more work never takes less time."""

    def __init__(
        self, knots: Sequence[float], values: Sequence[float], slope: float, others: Sequence[float]
    ) -> None:
        """`values` are those at the knots, which rise from 0 on; `slope` is the one beyond the last knot;
        `others` are the three factors k."""
        self._knots = list(knots)
        self._values = list(values)
        self._slopes = [
            (values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)
        ] + [slope]
        self._a, self._b, self._c = others

    @staticmethod
    def fit(x: Sequence[float], others: Sequence[Sequence[float]], seconds: Sequence[float]) -> Curve:
        """Returns the curve that fits x [R] and others [R, 3]. The knots are those x that come more than
        once, but for the smallest and the largest, past which lines go on."""
        often = sorted(value for value, times in Counter(x).items() if times > 1)
        knots = [0.0, *(value for value in often if min(x) < value < max(x))]
        at = np.asarray(x, float)[:, None]
        begins, ends = np.array(knots), np.array([*knots[1:], np.inf])
        rises = np.clip(at - begins, 0.0, ends - begins)
        features = np.column_stack([np.ones(len(x)), rises, np.asarray(others, float)])
        found = fit_positive(features, np.asarray(seconds, float))
        slopes = found[1 : 1 + len(knots)]
        values = found[0] + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(begins))])
        return Curve(knots, values.tolist(), float(slopes[-1]), found[1 + len(knots) :].tolist())

    def seconds(self, x: float, a: float, b: float, c: float) -> float:
        i = bisect_right(self._knots, x) - 1
        return (
            self._values[i] + self._slopes[i] * (x - self._knots[i]) + self._a * a + self._b * b + self._c * c
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of |predicted / measured − 1| over `rows` rows: median and 90th percentile. `bias` is the
    median of predicted / measured − 1."""

    rows: int
    median: float
    p90: float
    bias: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> Spread:
        """Returns the spread of rows in the same order, one at least."""
        wrong = np.asarray(predicted) / np.asarray(measured) - 1.0
        off = np.abs(wrong)
        return Spread(len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(wrong)))


FOLDS: Final = 5

Kind = tuple[str, bool]  # a model, and whether the job is a decode step


class _Shares:
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
        if above == 0 or high <= cores + 1e-9:  # fewer hands than were ever measured, or just as many
            return many * max(1.0, high / cores)
        low, few = self._cores[above - 1], self._curves[above - 1].seconds(x, *others)
        part = math.log(cores / low) / math.log(high / low)
        return float(few ** (1.0 - part) * many**part)


class Measured:
    """Satisfies `Operated`. `cores` is the number that the unit has; by default it has all of the profile's.

    A prefill takes f(tokens) + a · pairs + b · context + c · sequences, a decode step f(sequences) + a ·
    context, fitted for each model and number of cores to what was measured. A mixed job takes what the
    prefill and the decode step in it take one after the other, less a decode step of one empty sequence,
    because the weights are read once for both. Beside others a job takes as many times longer as pairs of
    such jobs did, in proportion to the others' shares, and if all shares are more than the whole, as many
    times more.

    Operators were not measured. Attention is what a job takes longer for its pairs and its context; the rest
    is spread over the products by the weights that they read. Starts and polls are in it, or nothing.
    """

    start: Final = 0.0
    poll: Final = 0.0

    def __init__(self, profile: Profile, cores: int | None = None) -> None:
        self._cores = cores or profile.cores
        self._shares = _fit_all(profile)
        self._crowding = _crowding(profile.crowded, profile.cores, profile.shapes)
        self._between = _between(profile)
        self._shapes = profile.shapes

    def seconds(self, work: Work, beside: Sequence[Work] = ()) -> float:
        kind = work.model, work.phase is Phase.DECODE
        alone = self._alone(work)
        if not beside:
            return alone
        together, slower = work.share, 1.0
        for other in beside:
            together += other.share
            rate = self._crowding.get((kind, (other.model, other.phase is Phase.DECODE)), 0.0)
            slower += rate * other.share
        return alone * slower * max(1.0, together)

    def _alone(self, work: Work) -> float:
        if work.phase is Phase.MIXED:
            # Its parts run one after the other but for the weights, which are read once for both.
            read = self._alone(Work.decode(work.model, work.share, (0,)))
            return self._alone(work.prompts) + self._alone(work.step) - read
        shares = self._shares.get((work.model, work.phase is Phase.DECODE))
        if shares is None:
            known = sorted({model for model, _ in self._shares})
            raise ConfigError(f"model {work.model!r} was not measured; {', '.join(known)} were")
        return shares.seconds(work.share * self._cores, work)

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

    def between(self, sequences: int) -> float:
        """Returns the seconds of the engine's own work from the result of a step of so many sequences to the
        next launch; 0 if that was not measured."""
        return self._between.seconds(sequences, 0.0, 0.0, 0.0) if self._between else 0.0


def cross_validate(profile: Profile) -> dict[str, Spread]:
    """Returns, by model and phase, every job predicted by a fit to the other folds'."""
    order = random.Random(0).sample(profile.jobs, len(profile.jobs))
    order.sort(key=lambda timed: (timed.doing.model, timed.doing.phase, timed.doing.cores))  # even folds
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fold in range(FOLDS):
        model = Measured(replace(profile, jobs=tuple(t for i, t in enumerate(order) if i % FOLDS != fold)))
        for timed in order[fold::FOLDS]:
            doing = timed.doing
            pair = model.seconds(doing.work(profile.cores)), median(timed.seconds)
            for key in (f"{doing.model}, {doing.phase.value}", "all"):
                found[key].append(pair)
    return {key: Spread.of(*zip(*pairs, strict=True)) for key, pairs in sorted(found.items())}


def _features(work: Work) -> tuple[float, float, float, float]:
    """Returns the inputs of a curve."""
    if work.phase is Phase.DECODE:
        return work.batch, work.context, 0.0, 0.0
    return work.tokens, work.pairs, work.context, work.batch


def _fit_all(profile: Profile) -> dict[Kind, _Shares]:
    """Fits all phases of all models. Raises ConfigError if a phase of a model was not measured."""
    groups: dict[Kind, dict[int, list[Timed]]] = {
        (model, decode): {} for model in profile.shapes for decode in (False, True)
    }
    for timed in profile.jobs:
        kind = timed.doing.model, timed.doing.phase is Phase.DECODE
        groups[kind].setdefault(timed.doing.cores, []).append(timed)
    return {kind: _Shares(_curves(kind, of_cores)) for kind, of_cores in groups.items()}


def _curves(kind: Kind, groups: Mapping[int, Sequence[Timed]]) -> dict[int, Curve]:
    if not groups:
        phase = Phase.DECODE if kind[1] else Phase.PREFILL
        raise ConfigError(f"no {phase.value} of {kind[0]} was measured; `kvloom profile` measures it")
    curves = {}
    for cores, group in groups.items():
        rows = [_features(timed.doing.work(cores)) for timed in group]
        seconds = [median(timed.seconds) for timed in group]
        curves[cores] = Curve.fit([x for x, *_ in rows], [others for _, *others in rows], seconds)
    return curves


def _crowding(
    crowded: Iterable[Crowded], cores: int, models: Iterable[str]
) -> dict[tuple[Kind, Kind], float]:
    """Returns how many times longer, less one, a job takes beside another with all of the cores: by both
    kinds, and for models that were not measured together as others were on average."""
    seen: dict[tuple[Kind, Kind], list[float]] = defaultdict(list)
    phases: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    for pair in crowded:
        one, other = [(doing.model, doing.phase is Phase.DECODE) for doing in (pair.doing, pair.beside)]
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


def _between(profile: Profile) -> Curve | None:
    if not profile.steps:
        return None
    counts = [stepped.sequences for stepped in profile.steps]
    return Curve.fit(counts, [(0.0, 0.0, 0.0)] * len(counts), [stepped.between for stepped in profile.steps])


SLOWEST: Final = 0.02  # of a job's own pace, while its process's loop works

HostedKind = tuple[str, bool, int]  # a model, whether the job is a decode step, and its cores
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Upkeep:
    """CPU seconds of one thread's work: for a request, for a token, for each time that tokens come."""

    request: float = 0.0
    token: float = 0.0
    turn: float = 0.0


class Hosting:
    """`cores` are those of the machine. Jobs that were not measured fare as others of their phase."""

    def __init__(self, profile: Profile) -> None:
        self.cores = profile.computer.cores
        self._upkeep = {
            hosted.role: Upkeep(hosted.request, hosted.token, hosted.turn) for hosted in profile.hosted
        }
        self._slower = _Known((row.doing, (row.over, row.seconds / row.alone)) for row in profile.pressed)
        self._served = {(row.model, row.phase is Phase.DECODE): row.seconds for row in profile.served}
        self._lost = _Known((row.doing, (1, (row.seconds - row.alone) / row.busy)) for row in profile.stalled)

    def upkeep(self, role: Role) -> Upkeep:
        return self._upkeep.get(role, Upkeep())

    def slower(self, work: Work, cores: float, over: float) -> float:
        """Returns how many times longer a job on so many cores takes while `over` more threads want to run
        than the machine has cores, straight between what was measured, and beyond it."""
        known = self._slower.of(work, cores)
        if over <= 0.0 or not known:
            return 1.0
        threads, times = [0.0, *(at for at, _ in known)], [1.0, *(times for _, times in known)]
        if over <= threads[-1]:
            return max(1.0, float(np.interp(over, threads, times)))
        return max(1.0, 1.0 + (times[-1] - 1.0) * over / threads[-1])

    def served(self, work: Work) -> float:
        """Returns the seconds by which a served job takes longer than one that is repeated. A job that also
        has prompts takes what prefills do."""
        return self._served.get((work.model, work.phase is Phase.DECODE), 0.0)

    def pace(self, work: Work, cores: float) -> float:
        """Returns the part of its own pace that a job keeps while its process's loop works."""
        known = self._lost.of(work, cores)
        return min(1.0, max(SLOWEST, 1.0 - known[0][1])) if known else 1.0


class _Known:
    """The points of each kind of job: for each x, the median of all y."""

    def __init__(self, rows: Iterable[tuple[JobMeasured, Point]]) -> None:
        found: dict[HostedKind, list[Point]] = defaultdict(list)
        for doing, point in rows:
            found[doing.model, doing.phase is Phase.DECODE, doing.cores].append(point)
        self._points = {kind: _medians(points) for kind, points in found.items()}
        self._nearest: dict[tuple[str, bool, float], list[Point]] = {}

    def of(self, work: Work, cores: float) -> list[Point]:
        """Returns the model's own costs if it was measured, on the nearest number of cores that was."""
        asked = work.model, work.phase is Phase.DECODE, cores
        if asked not in self._nearest:
            self._nearest[asked] = self._find(*asked)
        return self._nearest[asked]

    def _find(self, model: str, decode: bool, cores: float) -> list[Point]:
        kinds = [kind for kind in self._points if kind[1] == decode]
        kinds = [kind for kind in kinds if kind[0] == model] or kinds
        near = min((abs(kind[2] - cores) for kind in kinds), default=0.0)
        return _medians(
            point for kind in kinds if abs(kind[2] - cores) == near for point in self._points[kind]
        )


def _medians(points: Iterable[Point]) -> list[Point]:
    found: dict[int, list[float]] = defaultdict(list)
    for x, y in points:
        found[x].append(y)
    return [(x, median(ys)) for x, ys in sorted(found.items())]
