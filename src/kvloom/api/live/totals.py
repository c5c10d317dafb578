"""The counts of a gateway's requests by model, as samples have them."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from kvloom.api.metrics import UNKNOWN, Metrics
from kvloom.journal.samples import ModelTotals


def model_totals(metrics: Metrics) -> tuple[ModelTotals, ...]:
    """Returns the counts of requests by model, and the sums of their times. Requests that name no model that
    is served are left out."""
    requests = _by_model(metrics.requests, "_total")
    sums = [_by_model(one, "_sum") for one in (metrics.first_token, metrics.per_token)]
    counts = [_by_model(one, "_count") for one in (metrics.first_token, metrics.per_token)]
    return tuple(
        ModelTotals(
            model=model,
            requests=int(number),
            ttft_sum=sums[0].get(model, 0.0),
            ttft_count=int(counts[0].get(model, 0)),
            tpot_sum=sums[1].get(model, 0.0),
            tpot_count=int(counts[1].get(model, 0)),
        )
        for model, number in requests.items()
        if model != UNKNOWN
    )


def _by_model(metric: Counter | Histogram, end: str) -> dict[str, float]:
    """Returns the values of the series whose names end so, by model."""
    values: dict[str, float] = {}
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(end):
                model = sample.labels["model"]
                values[model] = values.get(model, 0.0) + sample.value
    return values
