"""Streams are resumed at the next gateway after kill -9 of the one that they came from."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvloom.config.config import DEMO
from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE
from tests.serve.streaming import asking, serving

CONFIG = f"""
kv_memory: 64MiB
block_bytes: 4KiB
models: {{{{guide: {DEMO}/guide, stories: {DEMO}/stories, endless: {{endless}}}}}}
units:
  - models: [stories, guide]
  - models: [stories, endless]
"""
JSON = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 120}}, "required": ["a"]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "What is a block?"}]
STREAMS, SOON, LONG = 10, 12, 200  # each stream stops reading after so many events; tokens of a choice
MOST = 30_000  # tokens of a stream that is always under way: what takes half a minute
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"model": "stories", "prompt": "Once upon a time", "n": 3}),
    (COMPLETIONS, {"model": "stories", "prompt": "One day", "logprobs": 1}),
    (COMPLETIONS, {"model": "stories", "prompt": "Tell:", "guided_json": JSON}),
    (COMPLETIONS, {"model": "stories", "prompt": ["A dog", "A cat"], "stop": ["zzzz", "qqqq"]}),
    (CHAT, {"model": "guide", "messages": HI, "n": 2}),
)


@dataclass
class Reader:
    """A client that keeps what it was told of each choice, and the id of its last event."""

    path: str
    body: dict[str, Any]
    ids: list[str] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    most: int | None = None
    """It hangs up after so many events, as if that were the end."""

    def read(self, url: str, last: str = "", meet: threading.Barrier | None = None) -> bool:
        """Returns whether the stream came to its end. meet: where the reader waits after its first events."""
        request: urllib.request.Request = asking(url, self.path, self.body)
        if last:
            request.add_header("last-event-id", last)
        event: dict[bytes, bytes] = {}
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as response:
                for line in response:
                    name, _, value = line.rstrip(b"\n").partition(b": ")
                    if name:
                        event[name] = value
                    elif event[b"data"] == b"[DONE]":
                        return True
                    else:
                        self.ids.append(event[b"id"].decode())
                        self.chunks.append(json.loads(event[b"data"]))
                        event = {}
                        if meet and len(self.ids) == SOON:
                            meet.wait(DEADLINE)
                        if len(self.ids) == self.most:
                            return True
        except (OSError, HTTPException):
            return False  # the gateway is gone
        return False

    @property
    def said(self) -> dict[Any, Any]:
        """The text, the tokens and the end of each choice, the usage, and the answer's ids."""
        whole: dict[Any, Any] = {"heads": {(one["id"], one["created"]) for one in self.chunks}}
        for chunk in self.chunks:
            if chunk["usage"]:
                whole["usage"] = {**chunk["usage"], "prompt_tokens_details": None}
            for choice in chunk["choices"]:
                text, entries, ends = whole.setdefault(choice["index"], ("", [], []))
                text += choice.get("delta", {}).get("content", "") + choice.get("text", "")
                entries += (choice["logprobs"] or {}).get("tokens", [])
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                whole[choice["index"]] = text, entries, ends
        return whole


def readers() -> list[Reader]:
    more = {"stream": True, "stream_options": {"include_event_ids": True, "include_usage": True}}
    more |= {"max_tokens": LONG, "temperature": 0.9, "ignore_eos": True}
    endless = {"model": "endless", "prompt": [1, 2, 3], "max_tokens": MOST}
    return [
        *(Reader(path, more | body) for path, body in (ASKED * STREAMS)[:STREAMS]),
        Reader(COMPLETIONS, more | endless, most=LONG),
    ]


def test_streams_of_a_killed_gateway_are_resumed_each_exactly(tmp_path: Path) -> None:
    """Their seeds are the server's own, and a resumed stream is compared with all of it made once more."""
    path = make_checkpoint(tmp_path / "endless", "llama", max_position_embeddings=2 * MOST)
    config = CONFIG.format(endless=path)
    with serving(tmp_path, config) as (running, url), ThreadPoolExecutor(STREAMS + 1) as pool:
        asked, gateway = readers(), running.children()["gateway"]
        meet = threading.Barrier(STREAMS + 1, action=lambda: os.kill(gateway, signal.SIGKILL))
        reading = [pool.submit(reader.read, url, meet=meet) for reader in asked]
        assert not reading[-1].result()  # some were under way
        running.wait_for("gateway | was killed by SIGKILL")
        broken = [reader for reader, one in zip(asked, reading, strict=True) if not one.result()]
        assert all(pool.map(lambda reader: reader.read(url, reader.ids[-1]), broken))
        again = [Reader(one.path, one.body, one.ids[:1], one.chunks[:1], one.most) for one in asked]
        assert all(pool.map(lambda reader: reader.read(url, reader.ids[0]), again))
        for one, other in zip(asked, again, strict=True):
            assert one.said == other.said
            assert len(one.said["heads"]) == 1
            assert one.most or one.said["usage"]["completion_tokens"] > 0
