"""A fleet of two units whose program is changed while it answers, and whose verbs anyone may drive."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from kvloom.router.programs import PROGRAMS
from tests.processes import DEADLINE, fleet

CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
models: {{guide: {DEMO}/guide, sums: {DEMO}/sums}}
units: [{{models: [guide, sums], replicas: 2}}]
"""
PROMPT = list(range(40, 90))
OWN = """
from kvloom.router import Call, Fleet, Frames


async def evicting(call: Call, fleet: Fleet) -> Frames:
    replica = fleet.nearest(call.prompt, slack=4096)
    try:
        async for frame in call.start_generate(replica):
            yield frame
    finally:
        await call.evict(replica)


async def keeping(call: Call, fleet: Fleet, *, seconds: int = 300) -> Frames:
    replica = fleet.nearest(call.prompt, slack=4096)
    try:
        async for frame in call.start_generate(replica):
            yield frame
    finally:
        await call.keep(replica, seconds=seconds)
"""


@pytest.fixture(scope="module", params=["shm", "tcp"])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    file.write_text(f"{CONFIG}transport: {request.param}\n")
    file.with_name("caching_programs.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(file.parent), os.environ.get("PYTHONPATH", "")]))
        with fleet(str(file)) as running:
            yield running.wait_until_ready()


def call(url: str, path: str, body: object) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        return [json.loads(line) for line in response] if path.endswith("generate") else json.load(response)


def test_the_program_changes_while_streams_run(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams of several threads all the while: no error, and always the same text."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
    seen: list[str] = []
    over = threading.Event()

    def listen(number: int) -> None:
        while not over.is_set():
            question: ChatCompletionUserMessageParam = {
                "role": "user",
                "content": f"What is {17 + number} + 25?",
            }
            stream = client.chat.completions.create(
                model="sums", messages=[question], temperature=0, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            seen.append(f"{number}: {text}")

    listeners = [threading.Thread(target=listen, args=(number,)) for number in range(4)]
    for listener in listeners:
        listener.start()
    try:
        for name in [*PROGRAMS, "disaggregate"]:
            count = len(seen)
            assert main(["program", "set", name, "--url", url]) == 0
            assert main(["program", "show", "--url", url]) == 0
            assert capsys.readouterr().out.splitlines()[-1].startswith(name)
            while len(seen) < count + 8 and any(listener.is_alive() for listener in listeners):
                listeners[0].join(0.01)
    finally:
        over.set()
        for listener in listeners:
            listener.join(DEADLINE)
    assert set(seen) == {f"{number}: {17 + number} + 25 = {42 + number}." for number in range(4)}
    assert main(["program", "set", "none_such", "--url", url]) == 1
    assert "none_such" in capsys.readouterr().err


def test_the_verbs_by_hand(url: str) -> None:
    """As the OpenAPI page tells: room at one unit, filled by the other, and an answer from there."""
    document = call(url, "/openapi.json", None)
    assert "/verbs/{unit}/prep_recv" in document["paths"]
    ask = {"model": "sums", "request": "by-hand", "prompt": PROMPT}
    spot = call(url, "/verbs/unit-1/prep_recv", ask | {"end": -1})
    assert spot["matched"] == 0
    send = ask | {"address": spot["address"], "peer": spot["peer"], "end": -1}
    sent = call(url, "/verbs/unit-0/remote_send", send)
    assert sent == {"cached": 0, "computed": len(PROMPT) - 1}
    sampling = {"max_tokens": 5, "seed": 0}
    moved = call(url, "/verbs/unit-1/start_generate", ask | {"begin": -1, "sampling": sampling})
    alone = call(url, "/verbs/unit-0/start_generate", ask | {"request": "alone", "sampling": sampling})

    def tokens(lines: list[Any]) -> list[int]:
        return [event[3] for line in lines for event in line if event[0] in ("first", "token")]

    assert tokens(moved) == tokens(alone)
    assert len(tokens(moved)) == 5
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE) as response:
        told = response.read().decode()
    path = call(url, "/verbs/unit-0/load", None)["path"]
    assert spot["peer"]["kind"] == path
    assert f'kvloom_kv_sent_bytes_total{{path="{path}",unit="unit-0"}}' in told
    with pytest.raises(urllib.error.HTTPError, match="400"):
        call(url, "/verbs/unit-1/renew", {"request": "by-hand"})


def test_programs_evict_and_keep(url: str) -> None:
    """Over two real engines: what each has cached and pinned after the request is over."""

    def blocks(kind: str) -> int:
        loads = [call(url, f"/verbs/unit-{unit}/load", None) for unit in (0, 1)]
        return sum(load["models"]["guide"][f"{kind}_blocks"] for load in loads)

    def ask() -> None:
        body = {"model": "guide", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        assert call(url, "/v1/completions", body)["choices"][0]["finish_reason"]

    assert main(["program", "set", "caching_programs:evicting", "--url", url]) == 0
    ask()
    assert (blocks("cached"), blocks("used")) == (0, 0)
    names = {unit: call(url, f"/verbs/unit-{unit}/contents", {"life": "", "version": 0}) for unit in (0, 1)}
    assert main(["program", "set", "caching_programs:keeping", "--url", url]) == 0
    ask()
    assert blocks("pinned") > 0
    pinned = blocks("pinned")
    ask()  # it is the same pin
    assert blocks("pinned") == pinned
    body = {"model": "guide", "prompt": PROMPT}
    told = [call(url, f"/verbs/unit-{unit}/evict", body)["pinned"] for unit in (0, 1)]
    assert sorted(told) == [0, len(PROMPT)]
    since = {unit: {field: one[field] for field in ("life", "version")} for unit, one in names.items()}
    come = [call(url, f"/verbs/unit-{unit}/contents", since[unit]) for unit in (0, 1)]
    assert [bool(one.get("come")) for one in come] == [bool(count) for count in told]
    assert main(["program", "set", "data_parallel", "--url", url]) == 0


def test_a_unit_that_is_none(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        call(url, "/verbs/unit-7/load", None)
