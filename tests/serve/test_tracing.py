"""Traces, as a real receiver of OpenTelemetry's own messages has them."""

from __future__ import annotations

import gzip
import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvloom.config.fields import check_collector
from kvloom.journal.lives import Lives, Tokens
from kvloom.journal.records import Died, Event, Moved, Preempted, Record
from tests.processes import DEADLINE

HERE = importlib.util.find_spec("opentelemetry") is not None
needs_extra = pytest.mark.skipif(not HERE, reason="the extra `otlp` is not installed")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Receiver:
    url: str = ""
    status: int = 200
    asked: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    senders: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415
        ExportTraceServiceRequest,
    )

    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if found.status == 200:
                for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                    found.senders.append(words(one.resource.attributes))
                    found.spans += [span for scope in one.scope_spans for span in scope.spans]
            found.paths.append(self.path)
            self.send_response(found.status)
            self.end_headers()
            found.asked.set()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{http.server_port}"
        yield found
        http.shutdown()
        thread.join()


def words(attributes: Any) -> dict[str, str]:
    return {one.key: one.value.string_value or str(one.value.int_value) for one in attributes}


def record(event: Event) -> Record:
    return Record(journal=7, number=1, at=1000.5, component="unit-0", event=event)


MOVED = Moved(
    request="r-1~2", model="chat", source="unit-0", destination="unit-1", reason="freeness 12 to 48"
)
PREEMPTED = Preempted(request="other", model="chat", reason="gave way")


@needs_extra
def test_a_request_is_a_span_with_its_phases_below_its_callers(receiver: Receiver) -> None:
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415

    lives = Lives()
    with tracing(receiver.url, "gateway", pytest.fail) as traces:
        lives.ended = traces.end
        story = lives.begin("x-1", PARENT)
        story.model, story.api_id = "chat", "chatcmpl-1"
        story.tokens_by(lambda: Tokens(prompt=100, output=20, cached=16))
        lives.ask(story, ["r-1"])
        for what in ("queued", "admitted", "first_token"):
            lives.tell("r-1", what, "unit-0")
        traces.note([record(MOVED), record(PREEMPTED)])
        story.end(200)
    assert receiver.paths == ["/v1/traces"]
    assert receiver.senders == [{"service.name": "kvloom", "service.instance.id": "gateway"}]
    spans = {span.name: span for span in receiver.spans}
    assert sorted(spans) == ["decode", "prefill", "queued", "request"]
    whole = spans["request"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    at = {step.what: round(step.at * 1e9) for step in story.life().steps}
    for name, begun, ended in (
        ("request", "came", "ended"),
        ("queued", "came", "admitted"),
        ("prefill", "admitted", "first_token"),
        ("decode", "first_token", "ended"),
    ):
        span = spans[name]
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (at[begun], at[ended])
        assert span.trace_id == whole.trace_id
        assert name == "request" or span.parent_span_id == whole.span_id
    told = words(whole.attributes)
    assert told["gen_ai.request.model"] == "chat"
    assert told["gen_ai.usage.input_tokens"] == "100"
    assert told["gen_ai.usage.output_tokens"] == "20"
    assert told["kvloom.request_id"] == "x-1"
    events = {event.name: words(event.attributes) for event in whole.events}
    assert events["moved"] == {"kvloom.unit": "unit-1", "kvloom.reason": "freeness 12 to 48"}
    assert "preempted" not in events


@needs_extra
def test_a_request_that_failed_while_it_waited(receiver: Receiver) -> None:
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415

    lives = Lives()
    with tracing(f"{receiver.url}/own/path", "gateway", pytest.fail) as traces:
        lives.ended = traces.end
        lives.begin("x-1", "no traceparent").end(503, "no unit")
    assert receiver.paths == ["/own/path"]
    spans = {span.name: span for span in receiver.spans}
    assert sorted(spans) == ["queued", "request"]
    assert spans["request"].parent_span_id == b""
    assert (spans["request"].status.code, spans["request"].status.message) == (2, "no unit")


@needs_extra
def test_events_of_the_fleet_are_spans_and_those_of_requests_are_not(receiver: Receiver) -> None:
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415

    with tracing(receiver.url, "fleet", pytest.fail) as traces:
        traces.tell([record(MOVED), record(Died(reason="signal 9", again=None))])
    (span,) = receiver.spans
    assert (span.name, span.start_time_unix_nano) == ("fleet died", 1_000_500_000_000)
    assert words(span.attributes) == {"kvloom.reason": "signal 9", "kvloom.component": "unit-0"}


@needs_extra
def test_a_collector_that_takes_nothing_is_told_of_once(receiver: Receiver) -> None:
    from kvloom.serve.processes.tracing import tracing  # noqa: PLC0415

    receiver.status = 400  # which is not tried again
    told, lives = list[str](), Lives()
    with tracing(receiver.url, "gateway", told.append) as traces:
        lives.ended = traces.end
        for name in ("x-1", "x-2"):
            receiver.asked.clear()
            lives.begin(name).end(200)
            traces.flush()
            assert receiver.asked.wait(DEADLINE)
    assert len(receiver.paths) >= 2
    assert told == [f"{receiver.url}/v1/traces: takes no traces; the fleet serves on without them"]


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://h", "http://", "http://h:x", "http://h\n"])
def test_what_is_no_collector_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:4318 is right"):
        check_collector(url)


@pytest.mark.skipif(HERE, reason="the extra `otlp` is installed")
def test_a_missing_extra_is_told() -> None:
    with pytest.raises(ValueError, match=r"pip install 'kvloom\[otlp\]'"):
        check_collector("http://127.0.0.1:4318")


@needs_extra
def test_a_collector_is_taken() -> None:
    assert check_collector("https://collector:4318") == "https://collector:4318"
