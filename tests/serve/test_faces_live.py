"""The same prompt through every API gives the same text, also if its engine is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import make_checkpoint
from tests.processes import DEADLINE
from tests.serve.streaming import asking, serving

CONFIG = """
kv_memory: 64MiB
block_bytes: 4KiB
threads: 1
models: {{plain: {plain}}}
units: [{{models: [plain], replicas: 2}}]
"""
HI = [{"role": "user", "content": "What is a block?"}]
SOON, LONG = 8, 160  # pieces of each stream after which an engine dies; tokens of an answer


@dataclass(frozen=True)
class Face:
    path: str
    body: dict[str, Any]
    piece: Callable[[Any], str]
    """Takes an event, and returns the text in it."""


FACES = {
    "chat": Face(
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": LONG, "temperature": 0},
        lambda event: event["choices"][0]["delta"].get("content") or "",
    ),
    "messages": Face(
        "/v1/messages",
        {"messages": HI, "max_tokens": LONG, "temperature": 0},
        lambda event: event.get("delta", {}).get("text") or "",
    ),
    "responses": Face(
        "/v1/responses",
        {"input": HI, "max_output_tokens": LONG, "temperature": 0},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "ollama": Face(
        "/api/chat",
        {"messages": HI, "options": {"num_predict": LONG, "temperature": 0}},
        lambda event: event["message"]["content"],
    ),
}


def pieces(url: str, face: Face) -> Iterator[str]:
    asked = asking(url, face.path, {"model": "plain", "stream": True} | face.body)
    with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data:").strip()
            if data.startswith(b"{"):
                yield face.piece(json.loads(data))


def test_every_face_says_the_same_while_an_engine_dies(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", max_position_embeddings=1024)
    with serving(tmp_path, CONFIG.format(plain=plain)) as (fleet, url):
        alone = "".join(pieces(url, FACES["chat"]))

        def kill() -> None:
            for unit in ("unit-0", "unit-1"):  # both, so that no stream is spared
                os.kill(fleet.children()[unit], signal.SIGKILL)

        meeting = threading.Barrier(len(FACES), action=kill, timeout=DEADLINE)

        def read(face: Face) -> str:
            text = ""
            for count, piece in enumerate(pieces(url, face), 1):
                text += piece
                if count == SOON:
                    meeting.wait()
            return text

        with ThreadPoolExecutor(len(FACES)) as pool:
            said = dict(zip(FACES, pool.map(read, FACES.values()), strict=True))
        assert said == dict.fromkeys(FACES, alone)
        assert len(alone) > LONG // 2
