"""A caller that hangs up is no error: nothing is logged of it, and what it asked for ends."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from kvloom.api.verbs import create_verbs
from kvloom.types.request import PROTOCOL
from kvloom.types.verbs import Answer, Body, Hold, RemoteSend, Verb
from tests.api.fleet import ADDRESS, PEER, Curt
from tests.serve.test_connection import run, served

SEND = RemoteSend(model="tiny", request="r", prompt=[1], address=ADDRESS, peer=PEER)
ASKED = {"remote_send": SEND, "hold": Hold(request="r", sends=[SEND])}


class Slow(Curt):
    """An engine that never answers a verb, and tells that it was asked, and that this has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    async def call(self, verb: Verb[Body, Answer], body: Body) -> Answer:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()
        raise AssertionError


@pytest.mark.parametrize("verb", ASKED)
@pytest.mark.parametrize("sent", ["all", "half"])
def test_a_caller_of_a_verb_that_hangs_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str, sent: str
) -> None:
    body = msgspec.json.encode(ASKED[verb])
    head = (
        f"POST /verbs/{verb} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s\r\n"
        f"kvloom-protocol: {PROTOCOL}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()

    async def play() -> None:
        engine = Slow()
        async with served(tmp_path, create_verbs(engine, secret="s")) as path:
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(head + (body if sent == "all" else body[:9]))
            if sent == "all":
                await engine.begun.wait()
            else:
                await writer.drain()
            writer.transport.abort()
            if sent == "all":
                await engine.over.wait()

    with caplog.at_level(logging.INFO):
        run(play)
    assert not [record for record in caplog.records if record.levelno > logging.INFO], caplog.text
