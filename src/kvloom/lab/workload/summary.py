"""Workloads and their results added up as they come, in memory that does not grow with their number."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from kvloom.journal.traffic import nearest_rank
from kvloom.lab.workload.request import Objective, RequestResult, WorkloadRequest
from kvloom.lab.workload.results import CURVE, Course, Latency, Results, Tally

MOST_ERRORS: Final = 64  # kinds; further ones are counted together
OTHER_ERRORS: Final = "other errors"
NO_TOKEN: Final = "not one token came"
COUNTS: Final = re.compile(r"(?<!\bstatus )(?<!\S)\d[\d.,]*(?!\S)")  # by which errors of one kind may differ
ERROR: Final = 0.004  # relative, of a quantile
LEAST: Final = 1e-9  # a smaller value counts as 0
MOST_STRETCHES: Final = 256  # of a series; past that, two become one
_GAMMA: Final = (1 + ERROR) / (1 - ERROR)
_SCALE: Final = 1 / math.log(_GAMMA)


class Histogram:
    """DDSketch (Masson, Rim and Lee, VLDB 2019, section 2.1): counts in buckets whose borders are powers of
    one number. Mean, least and largest are exact. From 1 ns to 11 days it has 4,400 buckets at most."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._small = 0
        self._buckets: dict[int, int] = defaultdict(int)

    @property
    def mean(self) -> float:
        """Returns the mean; 0 if nothing was added."""
        return self.total / self.count if self.count else 0.0

    @property
    def buckets(self) -> int:
        """Returns the number of buckets that hold a value."""
        return len(self._buckets)

    def add(self, value: float) -> None:
        """Adds a value of at least 0."""
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        if value < LEAST:
            self._small += 1
        else:
            self._buckets[math.ceil(math.log(value) * _SCALE)] += 1

    def merge(self, other: Histogram) -> None:
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        self._small += other._small
        for bucket, count in other._buckets.items():
            self._buckets[bucket] += count

    def quantiles(self, at: Sequence[float]) -> list[float]:
        """Returns for each q in [0, 1], in ascending order, the value of its nearest rank, within ERROR of
        it; 0 if nothing was added."""
        if not self.count:
            return [0.0] * len(at)
        found: list[float] = []
        buckets = iter(sorted(self._buckets))
        value, seen = 0.0, self._small
        for rank in (nearest_rank(q, self.count) for q in at):
            while seen < rank:
                bucket = next(buckets)
                seen += self._buckets[bucket]
                value = 2 * _GAMMA**bucket / (_GAMMA + 1)
            found.append(self.most if rank == self.count else min(max(value, self.least), self.most))
        return found

    def latency(self) -> Latency | None:
        """Returns the distribution; None if nothing was added."""
        if not self.count:
            return None
        p50, p80, p95, p99 = self.quantiles((0.5, 0.8, 0.95, 0.99))
        curve = self.quantiles(CURVE)
        return Latency(mean=self.mean, p50=p50, p80=p80, p95=p95, p99=p99, most=self.most, curve=curve)


class Series:
    """Sums over at most MOST_STRETCHES equal stretches of time, from 0 on."""

    def __init__(self, width: float = 1 / 64) -> None:
        """`width` is the seconds of the first stretches, which double as time goes on."""
        self.width = width
        self._sums: list[float] = []

    def add(self, begin: float, end: float, amount: float) -> None:
        """Adds `amount`, evenly from `begin` to `end`."""
        while end >= MOST_STRETCHES * self.width:
            self._double()
        first, last = int(begin / self.width), int(end / self.width)
        self._sums += [0.0] * (last + 1 - len(self._sums))
        if first == last:
            self._sums[last] += amount
            return
        pace = amount / (end - begin)
        self._sums[first] += ((first + 1) * self.width - begin) * pace
        self._sums[last] += (end - last * self.width) * pace
        for stretch in range(first + 1, last):
            self._sums[stretch] += self.width * pace

    def sums(self, width: float) -> list[float]:
        """Returns the sums of stretches of `width` seconds, which is this series' width or a power of two
        times it."""
        while self.width < width:
            self._double()
        return list(self._sums)

    def _double(self) -> None:
        self.width *= 2
        odd: Sequence[float] = [*self._sums[1::2], 0.0][: len(self._sums[::2])]
        self._sums = [a + b for a, b in zip(self._sums[::2], odd, strict=True)]


class Summary:
    """Results of requests, added up by model."""

    def __init__(self, objectives: Mapping[str, Objective] | None = None) -> None:
        """`objectives` are by the names under which their attainment is told."""
        self._objectives = dict(objectives or {})
        self._models: dict[str, _Sums] = {}
        self._errors: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}  # the first error of each kind, by its text without counts
        self._seconds = 0.0

    def add(self, result: RequestResult) -> None:
        request = result.request
        sums = self._models.get(request.model)
        if sums is None:
            sums = self._models[request.model] = _Sums(self._objectives)
        self._seconds = max(self._seconds, request.at + (result.end or 0.0))
        sums.add(result)
        if not _answered(result):
            self._errors[self._kind(result.error or NO_TOKEN)] += 1

    def _kind(self, error: str) -> str:
        """Returns the first error that differs from this one only in its counts."""
        kind = COUNTS.sub("#", error)
        if kind not in self._kinds and len(self._kinds) >= MOST_ERRORS:
            return OTHER_ERRORS
        return self._kinds.setdefault(kind, error)

    def results(
        self,
        source: Literal["benchmark", "simulation"],
        title: str,
        seconds: float | None = None,
        lateness: Histogram | None = None,
        client_cpu: float | None = None,
    ) -> Results:
        """Returns all that was added up.

        `seconds` tells how long the run took, if that is known better than from its last answer.
        `client_cpu` are the CPU seconds of the client, if there was one."""
        seconds = seconds or self._seconds or 1.0
        total = _Sums(self._objectives)
        for sums in self._models.values():
            total.merge(sums)
        width = max((sums.width for sums in self._models.values()), default=1.0)
        names = sorted(self._models)
        return Results(
            source=source,
            title=title,
            seconds=seconds,
            total=total.tally(seconds),
            models={name: self._models[name].tally(seconds) for name in names},
            width=width,
            courses={name: self._models[name].course(width) for name in names},
            errors=dict(self._errors),
            lateness=None if lateness is None else lateness.latency(),
            client_cpu=client_cpu,
        )


class _Sums:
    """Sums of one model's requests, or of all."""

    def __init__(self, objectives: Mapping[str, Objective]) -> None:
        self._objectives = objectives
        self._met = dict.fromkeys(objectives, 0)
        self._requests = self._errors = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._first, self._per_token, self._end = Histogram(), Histogram(), Histogram()
        self._asked, self._answered, self._tokens = Series(), Series(), Series()

    @property
    def width(self) -> float:
        return max(series.width for series in (self._asked, self._answered, self._tokens))

    def add(self, result: RequestResult) -> None:
        at = result.request.at
        self._requests += 1
        self._asked.add(at, at, 1)
        if not _answered(result):
            self._errors += 1
            return
        assert result.first is not None
        assert result.end is not None
        self._prompt_tokens += result.request.prompt
        self._cached_tokens += result.cached
        self._output_tokens += result.tokens
        self._first.add(result.first)
        self._end.add(result.end)
        if (per_token := result.per_token) is not None:
            self._per_token.add(per_token)
        self._answered.add(at + result.end, at + result.end, 1)
        self._tokens.add(at + result.first, at + result.end, result.tokens)
        for name, objective in self._objectives.items():
            self._met[name] += objective(result)

    def merge(self, other: _Sums) -> None:
        """Adds everything of the other but its course."""
        self._requests += other._requests
        self._errors += other._errors
        self._prompt_tokens += other._prompt_tokens
        self._cached_tokens += other._cached_tokens
        self._output_tokens += other._output_tokens
        self._first.merge(other._first)
        self._per_token.merge(other._per_token)
        self._end.merge(other._end)
        for name, met in other._met.items():
            self._met[name] += met

    def tally(self, seconds: float) -> Tally:
        return Tally(
            requests=self._requests,
            errors=self._errors,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            requests_per_second=(self._requests - self._errors) / seconds,
            tokens_per_second=self._output_tokens / seconds,
            first=self._first.latency(),
            per_token=self._per_token.latency(),
            end=self._end.latency(),
            attained={name: met / max(self._requests, 1) for name, met in self._met.items()},
        )

    def course(self, width: float) -> Course:
        return Course(
            asked=self._asked.sums(width),
            answered=self._answered.sums(width),
            tokens=self._tokens.sums(width),
        )


def _answered(result: RequestResult) -> bool:
    return not result.error and result.first is not None and result.end is not None


class ModelTraffic:
    """The load that a workload puts on one model."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt, self.output = Histogram(), Histogram()
        self.priorities: Counter[int] = Counter()
        self._last = 0.0
        self._gaps = self._squares = 0.0

    def add(self, request: WorkloadRequest) -> None:
        if self.requests:
            self._gaps += request.at - self._last
            self._squares += (request.at - self._last) ** 2
        self._last = request.at
        self.requests += 1
        self.prompt.add(request.prompt)
        self.output.add(request.output)
        self.priorities[request.priority] += 1

    @property
    def cv(self) -> float | None:
        """The standard deviation of the gaps between arrivals over their mean; None if there were fewer than
        two gaps."""
        gaps = self.requests - 1
        if gaps < 2 or not self._gaps:
            return None
        mean = self._gaps / gaps
        return float(max(self._squares / gaps - mean**2, 0.0) ** 0.5) / mean


class Traffic:
    """The load of a workload, by model and in all."""

    def __init__(self, requests: Iterable[WorkloadRequest]) -> None:
        self.models: dict[str, ModelTraffic] = {}
        self.total = ModelTraffic()
        self.seconds = 0.0
        """Returns the time from the start to the last arrival."""
        for request in requests:
            self.seconds = request.at
            if request.model not in self.models:
                self.models[request.model] = ModelTraffic()
            self.models[request.model].add(request)
            self.total.add(request)

    def rate(self, model: ModelTraffic) -> float:
        """Returns requests a second."""
        return model.requests / self.seconds if self.seconds else 0.0
