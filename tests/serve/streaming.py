"""Clients of a live fleet: streams, one after the other, each compared with what it should be."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import DEADLINE, Fleet, fleet, leaves_nothing


@contextmanager
def serving(folder: Path, config: str) -> Iterator[tuple[Fleet, str]]:
    """A fleet and its URL. Ctrl-C ends it, and leaves nothing and no error. folder: for its files."""
    file, sockets = folder / "fleet.yaml", folder / "s"
    file.write_text(config)
    sockets.mkdir()
    with fleet(str(file), folder=sockets) as running:
        yield running, running.wait_until_ready()
        with leaves_nothing(running, sockets):
            assert running.end(signal.SIGINT) == 0
        assert running.errors() == ""


def asking(url: str, path: str, body: object = None, key: str | None = None) -> urllib.request.Request:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)


def call(url: str, path: str, body: object = None, key: str | None = None) -> Any:
    with urllib.request.urlopen(asking(url, path, body, key), timeout=DEADLINE) as answer:
        return json.load(answer)


def metric(url: str, name: str) -> float:
    """The sum over the metric's labels, but for those that the name ends with."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE) as response:
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", response.read().decode(), re.M)
    assert found, name
    return sum(map(float, found))


def sum_of(url: str, a: int, b: int) -> str:
    asked = [{"role": "user", "content": f"What is {a} + {b}?"}]
    answer = call(url, "/v1/chat/completions", {"model": "sums", "temperature": 0, "messages": asked})
    return str(answer["choices"][0]["message"]["content"])


def states(url: str) -> dict[str, str]:
    return {unit["name"]: unit["state"] for unit in call(url, "/admin/units")}


def streamed(url: str, model: str, seed: int, tokens: int) -> urllib.request.Request:
    """What asks for a stream."""
    ask = {
        "model": model,
        "prompt": [1, 2, 3],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": seed,
        "stream": True,
    }
    return asking(url, "/v1/completions", ask)


def said(url: str, model: str, seed: int, tokens: int) -> str:
    """A stream's text, to its end."""
    with urllib.request.urlopen(streamed(url, model, seed, tokens), timeout=DEADLINE) as response:
        events = [line.removeprefix(b"data: ").strip() for line in response if line.strip()]
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@contextmanager
def streams(url: str, tokens: int, **models: int) -> Iterator[list[str]]:
    """So many of each model at any time, of which every one says what it says alone. Gives the models of
    those that have ended."""
    alone = {model: said(url, model, 7, tokens) for model in models}
    ended: list[str] = []
    over = threading.Event()

    def work(model: str) -> None:
        while not over.is_set():
            assert said(url, model, 7, tokens) == alone[model]
            ended.append(model)

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(work, model) for model, count in models.items() for _ in range(count)]
        try:
            yield ended
        finally:
            over.set()
        for one in working:
            one.result()
