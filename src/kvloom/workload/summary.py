"""Outcomes added up as they come, in memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from kvloom.workload.ask import Outcome
from kvloom.workload.histogram import Histogram
from kvloom.workload.objectives import Objective
from kvloom.workload.results import CURVE, Course, Latency, Results, Tally
from kvloom.workload.series import Series

MOST_ERRORS: Final = 64  # kinds; further ones are counted together
OTHER_ERRORS: Final = "other errors"
NO_TOKEN: Final = "not one token came"


class Summary:
    """objectives: by the names under which their attainment is told."""

    def __init__(self, objectives: Mapping[str, Objective] | None = None) -> None:
        self._objectives = dict(objectives or {})
        self._models: dict[str, _Sums] = {}
        self._errors: dict[str, int] = {}
        self._seconds = 0.0

    def add(self, outcome: Outcome) -> None:
        ask = outcome.ask
        sums = self._models.get(ask.model)
        if sums is None:
            sums = self._models[ask.model] = _Sums(self._objectives)
        self._seconds = max(self._seconds, ask.at + (outcome.end or 0.0))
        sums.add(outcome)
        if not _answered(outcome):
            kind = outcome.error or NO_TOKEN
            if kind not in self._errors and len(self._errors) >= MOST_ERRORS:
                kind = OTHER_ERRORS
            self._errors[kind] = self._errors.get(kind, 0) + 1

    def results(
        self,
        source: Literal["benchmark", "simulation"],
        title: str,
        seconds: float | None = None,
        lateness: Histogram | None = None,
    ) -> Results:
        """seconds: that the run took, where that is known better than from its last answer."""
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
            lateness=latency(lateness) if lateness is not None else None,
        )


class _Sums:
    """Of one model, or of all."""

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

    def add(self, outcome: Outcome) -> None:
        at = outcome.ask.at
        self._requests += 1
        self._asked.add(at, at, 1)
        if not _answered(outcome):
            self._errors += 1
            return
        assert outcome.first is not None
        assert outcome.end is not None
        self._prompt_tokens += outcome.ask.prompt
        self._cached_tokens += outcome.cached
        self._output_tokens += outcome.tokens
        self._first.add(outcome.first)
        self._end.add(outcome.end)
        if (per_token := outcome.per_token) is not None:
            self._per_token.add(per_token)
        self._answered.add(at + outcome.end, at + outcome.end, 1)
        self._tokens.add(at + outcome.first, at + outcome.end, outcome.tokens)
        for name, objective in self._objectives.items():
            self._met[name] += objective(outcome)

    def merge(self, other: _Sums) -> None:
        """All but the course."""
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
            first=latency(self._first),
            per_token=latency(self._per_token),
            end=latency(self._end),
            attained={name: met / max(self._requests, 1) for name, met in self._met.items()},
        )

    def course(self, width: float) -> Course:
        return Course(
            asked=self._asked.sums(width),
            answered=self._answered.sums(width),
            tokens=self._tokens.sums(width),
        )


def _answered(outcome: Outcome) -> bool:
    return not outcome.error and outcome.first is not None and outcome.end is not None


def latency(found: Histogram) -> Latency | None:
    """None where nothing was added."""
    if not found.count:
        return None
    p50, p80, p95, p99 = found.quantiles((0.5, 0.8, 0.95, 0.99))
    return Latency(
        mean=found.mean,
        p50=p50,
        p80=p80,
        p95=p95,
        p99=p99,
        most=found.most,
        curve=found.quantiles(CURVE),
    )
