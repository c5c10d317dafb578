"""What a workload asks for, added up by model in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvloom.workload.ask import Ask
from kvloom.workload.histogram import Histogram


class ModelTraffic:
    """Of one model. cv: of the gaps between arrivals, their standard deviation over their mean."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt, self.output = Histogram(), Histogram()
        self.priorities: Counter[int] = Counter()
        self._last = 0.0
        self._gaps = self._squares = 0.0

    def add(self, ask: Ask) -> None:
        if self.requests:
            self._gaps += ask.at - self._last
            self._squares += (ask.at - self._last) ** 2
        self._last = ask.at
        self.requests += 1
        self.prompt.add(ask.prompt)
        self.output.add(ask.output)
        self.priorities[ask.priority] += 1

    @property
    def cv(self) -> float | None:
        """None where there were not two gaps."""
        gaps = self.requests - 1
        if gaps < 2 or not self._gaps:
            return None
        mean = self._gaps / gaps
        return float(max(self._squares / gaps - mean**2, 0.0) ** 0.5) / mean


class Traffic:
    """seconds: to the last arrival. total: of all models; its `cv` is that of all arrivals."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self.models: dict[str, ModelTraffic] = {}
        self.total = ModelTraffic()
        self.seconds = 0.0
        for ask in asks:
            self.seconds = ask.at
            if ask.model not in self.models:
                self.models[ask.model] = ModelTraffic()
            self.models[ask.model].add(ask)
            self.total.add(ask)

    def rate(self, model: ModelTraffic) -> float:
        """Requests a second."""
        return model.requests / self.seconds if self.seconds else 0.0
