"""A model is woken from the page cache while streams of another one run.

python -m benchmarks.waking [--wakes 10] [--streams 4]

Two models of shape A in float32, about 350 MB each, and one of shape B in bfloat16 in one budget that holds
one A and B. Streams of B run all the time; the As are asked by turns, eight tokens for one, so that each time
one is woken and the other falls asleep. After each wake the same model is asked again, as it is awake: what
its prompt takes from the streams without a wake. Tells the first token of the woken, and the seconds from
token to token of B's streams until it came, and for a second from the asking on, over those in the second
before.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

import aiohttp
import msgspec
from rich.console import Console

from benchmarks.load import Load
from benchmarks.many_models import PATIENCE, serve
from benchmarks.places import checkpoint
from benchmarks.process import running
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from benchmarks.workload import Ask, lone

BUDGET: Final = 544 << 20  # bytes: A's 346 MiB, B's 41, the reserve, and a pool of about 130
WOKEN: Final = ("a1", "a2")
RUNNING: Final = "b"
BEFORE, REST = 1.0, 1.5  # seconds
MOST_FIRST, MOST_SLOWER = 0.4, 1.2
LONG: Final = 2000  # tokens of a stream, after which it begins anew


@dataclass(frozen=True, slots=True)
class Turn:
    """A request for a model, beside streams of another. first: seconds until its first token; until, second:
    how many times slower the streams were until then, and in the second from the asking on."""

    first: float
    until: float
    second: float

    def __str__(self) -> str:
        return f"{self.first:.3f} s, {self.until:.2f}×, {self.second:.2f}× in a second"


class Streams:
    """Streams of one model that never end."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        """When tokens came, of all streams."""
        self._url = url

    async def run(self, number: int) -> None:
        body = {
            "model": RUNNING,
            "prompt": [300 + number] * 8,
            "max_tokens": LONG,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data, headers = msgspec.json.encode(body), {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                async with session.post(f"{self._url}/v1/completions", data=data) as response:
                    response.raise_for_status()
                    async for part in response.content.iter_any():
                        self.times += [time.perf_counter()] * part.count(b"data: ")

    async def wakes(self) -> float:
        """Returns how many wakes there were."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        return sum(map(float, re.findall(r"^kvloom_weights_wakes_total\{.*\} (\S+)$", text, re.M)))

    def gap(self, begin: float, end: float, streams: int) -> float:
        """Returns the seconds from token to token of a stream."""
        return streams * (end - begin) / max(1, sum(begin < at <= end for at in self.times))


async def measure(wakes: int, streams: int, console: Console) -> Report:
    machine = this_machine()
    paths = {**dict.fromkeys(WOKEN, checkpoint("A")), RUNNING: checkpoint("B", "bfloat16")}
    models = {name: {"path": str(path)} for name, path in paths.items()}
    command, url = serve(models, {"memory": BUDGET}, "waking")
    found: dict[str, list[Turn]] = {"woken": [], "awake": []}
    async with running(command, patience=PATIENCE), asyncio.TaskGroup() as group:
        ours, load = Streams(url), Load(dict.fromkeys(WOKEN, url), stream=True)
        running_streams = [group.create_task(ours.run(i)) for i in range(streams)]
        asks = {name: iter(lone(name, 8, 1, 2 * wakes + 2)) for name in WOKEN}

        async def ask(one: Ask) -> Turn:
            await asyncio.sleep(REST)
            begin = time.perf_counter()
            (outcome,), _ = await load.drive([one])
            if outcome.ttft is None:
                raise RuntimeError(f"{one.model}: {outcome.error}")
            before = ours.gap(begin - BEFORE, begin, streams)
            await asyncio.sleep(BEFORE)
            meanwhile = ours.gap(begin, begin + outcome.ttft, streams)
            return Turn(outcome.ttft, meanwhile / before, ours.gap(begin, begin + BEFORE, streams) / before)

        for name in WOKEN:  # each has been asked once before it counts
            await ask(next(asks[name]))
        woken = await ours.wakes()
        for i in range(wakes):
            for turns in found.values():
                turns.append(await ask(next(asks[WOKEN[i % 2]])))
            console.print(f"wake {i}: {found['woken'][-1]}, awake: {found['awake'][-1]}", style="dim")
        woken = await ours.wakes() - woken
        for task in running_streams:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if woken != wakes:
        raise RuntimeError(f"{woken:g} models were woken instead of {wakes}")
    pairs = zip(found["woken"], found["awake"], strict=True)
    return Report(
        name="waking",
        title=f"{wakes} wakes of a model of 350 MB beside {streams} streams of another",
        columns=["", "first token, p50 s", "p90 s", "streams slower until then", "p90", "in a second", "p90"],
        rows=[_row(kind, turns) for kind, turns in found.items()],
        findings=[
            Finding(
                what="first token of the woken, p90",
                value=_p90([turn.first for turn in found["woken"]]),
                unit=" s",
                most=MOST_FIRST,
            ),
            Finding(
                what="streams slower in the second of a wake, median",
                value=median(turn.second for turn in found["woken"]),
                unit="×",
                most=MOST_SLOWER,
            ),
            Finding(
                what="streams slower until the first token, by the waking alone: woken / awake, median",
                value=median(one.until / other.until for one, other in pairs),
                unit="×",
                most=MOST_SLOWER,
            ),
        ],
        machine=machine,
    )


def _p90(found: list[float]) -> float:
    return quantiles(found, n=10)[8] if len(found) > 1 else found[0]


def _row(kind: str, turns: list[Turn]) -> list[Cell]:
    columns = [list(column) for column in zip(*((t.first, t.until, t.second) for t in turns), strict=True)]
    return [kind, *(cell for column in columns for cell in (median(column), _p90(column)))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--wakes", type=int, default=10)
    parser.add_argument("--streams", type=int, default=4)
    given = parser.parse_args()
    console = Console()
    publish(asyncio.run(measure(given.wakes, given.streams, console)), console)


if __name__ == "__main__":
    main()
