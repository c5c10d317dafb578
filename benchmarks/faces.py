"""What each API's translation adds to a first token, against OpenAI's chat.

python -m benchmarks.faces. The real gateway, and the real engine over a device that takes no time, as in
`benchmarks.streaming`. One conversation, asked through one API after the other, one request at a time: the
time from the request to the event that holds the first text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import aiohttp
from rich.console import Console

from benchmarks.report import Finding, Report, make_parser, publish, this_machine
from benchmarks.streaming import Front, front

MOST_MS: Final = 0.5
ROUNDS: Final = 300
TURNS: Final = [
    {"role": role, "content": "What is a block, and who holds it?"}
    for role in ("user", "assistant", "user", "assistant", "user")
]
CHAT: Final = "chat"


@dataclass(frozen=True, slots=True)
class Face:
    """text: what an event's line has that holds text."""

    path: str
    body: Mapping[str, Any]
    text: bytes


FACES: Final = {
    CHAT: Face("/v1/chat/completions", {"messages": TURNS, "max_tokens": 8}, b'"content":"'),
    "messages": Face("/v1/messages", {"messages": TURNS, "max_tokens": 8}, b'"text_delta"'),
    "responses": Face("/v1/responses", {"input": TURNS, "max_output_tokens": 8}, b"output_text.delta"),
    "ollama": Face("/api/chat", {"messages": TURNS, "options": {"num_predict": 8}}, b'"content":"'),
}


async def first(session: aiohttp.ClientSession, here: Front, face: Face) -> float:
    """Returns milliseconds to the first text of a stream, which is read to its end."""
    began, seconds = time.perf_counter(), 0.0
    body = {"model": "m", "stream": True, **face.body}
    async with session.post(here.url + face.path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not seconds and face.text in line and b'"content":""' not in line:
                seconds = time.perf_counter() - began
    if not seconds:
        raise RuntimeError(f"{face.path}: no text came")
    return 1e3 * seconds


async def measure(rounds: int) -> Report:
    machine = this_machine()
    taken: dict[str, list[float]] = {name: [] for name in FACES}
    async with front(0.0) as here, aiohttp.ClientSession() as session:
        for face in FACES.values():
            await first(session, here, face)
        for _ in range(rounds):
            for name, face in FACES.items():
                taken[name].append(await first(session, here, face))
    found = {name: median(times) for name, times in taken.items()}
    return Report(
        name="faces",
        title="Milliseconds to the first text, by API",
        columns=["", "ms", "more than a chat"],
        rows=[[name, found[name], found[name] - found[CHAT]] for name in FACES],
        findings=[
            Finding(what=f"{name} adds to a chat", value=found[name] - found[CHAT], unit=" ms", most=MOST_MS)
            for name in FACES
            if name != CHAT
        ],
        machine=machine,
        raw={**taken},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    publish(asyncio.run(measure(parser.parse_args().rounds)), Console())


if __name__ == "__main__":
    main()
