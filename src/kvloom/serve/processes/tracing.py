"""Traces for OpenTelemetry: a span for each request out of its life, and one for each event of the fleet.
They are made and sent on threads, and those that find no room are lost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Final

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvloom.journal.lives import Life, Step, Story
from kvloom.journal.records import Moved, Preempted, Quarantined, Record, Stayed
from kvloom.serve.processes.log import Background
from kvloom.types.clock import Clock

PERIOD: Final = 1.0  # seconds
LATE: Final = 3.0
"""Seconds after a request's end until when units may tell of it."""
MOST: Final = 10_000  # requests that wait to be told, and requests with events
SEND_SECONDS: Final = 5.0
_PATH: Final = "/v1/traces"
_PHASES: Final = (("queued", "came"), ("prefill", "admitted"), ("decode", "first_token"))
_ENDS: Final = ("ended", "failed", "cancelled")
_NANO: Final = 1_000_000_000


class _Sender:
    """Sends spans, and tells once when nobody takes them, until somebody does again. Satisfies
    `SpanExporter`."""

    def __init__(self, url: str, warn: Callable[[str], object]) -> None:
        self._url = url
        self._warn = warn
        self._failing = False
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=SEND_SECONDS)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            self._warn(f"{self._url}: takes no traces; the fleet serves on without them")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@contextmanager
def tracing(url: str, component: str, warn: Callable[[str], object]) -> Iterator[Traces]:
    """Gives what sends traces to a collector. url: with the path, or without it for the usual one; component:
    who sends; warn: takes a line, on a thread."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `warn` says it in one line
    endpoint = url if "/" in url.partition("://")[2].rstrip("/") else url.rstrip("/") + _PATH
    resource = Resource({"service.name": "kvloom", "service.instance.id": component})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(_Sender(endpoint, warn), schedule_delay_millis=1000 * PERIOD)
    )
    lines = Background("traces", lambda lost: warn(f"{url}: {lost} traces are lost"))
    traces = Traces(provider.get_tracer("kvloom"), lines.post)
    try:
        yield traces
    finally:
        traces.flush()
        lines.post(provider.shutdown)
        lines.close()


class Traces:
    """Makes spans of requests that have ended, and of events."""

    def __init__(self, tracer: Tracer, post: Callable[[Callable[[], object]], object]) -> None:
        """post: lets a thread call a function."""
        self._tracer = tracer
        self._post = post
        self._ended: deque[tuple[float, Story]] = deque(maxlen=MOST)
        self._records: dict[str, list[Record]] = {}
        """Of requests, by their ids at the router."""

    def end(self, story: Story) -> None:
        """Takes a request that has ended."""
        self._ended.append((monotonic(), story))

    def note(self, records: Sequence[Record]) -> None:
        """Keeps what the journal has of requests until these end."""
        for record in records:
            event = record.event
            if isinstance(event, Moved | Stayed | Preempted | Quarantined):
                self._records.setdefault(event.request.partition("~")[0], []).append(record)
        while len(self._records) > MOST:
            del self._records[next(iter(self._records))]

    def tell(self, records: Sequence[Record]) -> None:
        """Makes a span of each record that is not of a request."""
        for record in records:
            if not isinstance(record.event, Moved | Stayed | Preempted | Quarantined):
                self._post(lambda record=record: _tell_record(self._tracer, record))  # type: ignore[misc]

    async def run(self, clock: Clock) -> None:
        """Makes the spans of requests some seconds after their end, until it is cancelled."""
        while True:
            await clock.sleep(PERIOD)
            self.flush(monotonic() - LATE)

    def flush(self, until: float = float("inf")) -> None:
        """Makes the spans of requests that have ended by then."""
        while self._ended and self._ended[0][0] <= until:
            _, story = self._ended.popleft()
            records = [one for request in story.requests for one in self._records.pop(request, ())]
            life, trace = story.life(records), story.trace
            self._post(lambda life=life, trace=trace: _tell_life(self._tracer, life, trace))  # type: ignore[misc]


def _tell_record(tracer: Tracer, record: Record) -> None:
    told = msgspec.to_builtins(record.event)
    kind = told.pop("type")
    found = {f"kvloom.{key}": value for key, value in told.items() if value not in (None, "", [])}
    found["kvloom.component"] = record.component
    span = tracer.start_span(f"fleet {kind}", Context(), start_time=_nano(record.at), attributes=found)
    span.end(_nano(record.at))


def _tell_life(tracer: Tracer, life: Life, trace: str) -> None:
    """Makes the spans of a request. trace: the caller's `traceparent`."""
    parent = TraceContextTextMapPropagator().extract({"traceparent": trace}, Context())
    end = life.steps[-1].at
    root = tracer.start_span(
        "request",
        parent,
        SpanKind.SERVER,
        start_time=_nano(life.began),
        attributes={
            "gen_ai.request.model": life.model,
            "gen_ai.usage.input_tokens": life.prompt_tokens,
            "gen_ai.usage.output_tokens": life.output_tokens,
            "kvloom.cached_tokens": life.cached_tokens,
            "kvloom.request_id": life.id,
            "kvloom.api_id": life.api_id,
        },
    )
    inside = set_span_in_context(root, Context())
    begun = {what: next((one for one in life.steps if one.what == what), None) for _, what in _PHASES}
    for place, (name, what) in enumerate(_PHASES):
        if (first := begun[what]) is None:
            continue
        later = (begun[after] for _, after in _PHASES[place + 1 :])
        until = next((one.at for one in later if one is not None), end)
        at = {"kvloom.unit": first.unit} if first.unit else None
        span = tracer.start_span(name, inside, start_time=_nano(first.at), attributes=at)
        span.end(_nano(max(until, first.at)))
    for step in life.steps:
        if step.what not in begun and step.what not in _ENDS:
            root.add_event(step.what, _said(step), _nano(step.at))
    if life.state == "failed":
        root.set_status(Status(StatusCode.ERROR, life.steps[-1].reason))
    root.end(_nano(end))


def _said(step: Step) -> dict[str, str]:
    return {key: said for key, said in (("kvloom.unit", step.unit), ("kvloom.reason", step.reason)) if said}


def _nano(at: float) -> int:
    return round(at * _NANO)
