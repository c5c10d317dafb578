"""A served fleet whose requests reach an OpenTelemetry receiver as spans."""

from __future__ import annotations

import importlib.util
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvloom.config.config import DEMO
from tests.processes import DEADLINE
from tests.serve.streaming import asking, serving

CONFIG = "kv_memory: 64MiB\nmodels: {{sums: {demo}/sums}}\notlp: {url}\n"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="the extra is not installed")
def test_the_spans_of_a_request_arrive_below_its_callers(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415
        ExportTraceServiceRequest,
    )

    names: dict[str, set[str]] = {}
    arrived = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (span for scope in one.scope_spans for span in scope.spans):
                    names.setdefault(span.trace_id.hex(), set()).add(span.name)
            self.send_response(200)
            self.end_headers()
            if "request" in names.get(TRACE, ()):
                arrived.set()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}"
        with serving(tmp_path, CONFIG.format(demo=DEMO, url=url)) as (_, served):
            body = {"model": "sums", "prompt": "1+1=", "max_tokens": 4}
            request = asking(served, "/v1/completions", body)
            request.add_header("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] >= 1
            assert arrived.wait(DEADLINE)
        http.shutdown()
        thread.join()
    assert names[TRACE] == {"request", "queued", "prefill", "decode"}
    others = set().union(*(found for trace, found in names.items() if trace != TRACE))
    assert "fleet ready" in others
