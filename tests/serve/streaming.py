"""Clients of a live fleet: streams, one after the other, each compared with what it should be."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.processes import DEADLINE


def call(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        return json.load(answer)


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
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(ask).encode(), headers)


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
