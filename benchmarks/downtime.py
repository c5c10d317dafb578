"""How long a request that moves keeps its caller waiting, and what the others feel of it.

python -m benchmarks.downtime. Two engine processes, one core each, shape A, a batch of decodes at both, and a
router in this process. A request is moved by `Router.move` while it decodes; in turn, the same from the verbs
without live migration's stages: a blocking copy (it stands still before anything is copied), and computing
again at the target. Downtime is the longest gap between its tokens around the move, as its caller sees it,
less the usual gap. Llumnix: figure 10.

What a live move's gap is made of is told too: `hold`, from the last token at the source to the answer that it
stands still; `send`, to the answer that all has arrived; `start`, until the target has let it in; `last`, to
its first token there. Of that, `wait` is until the target's step that was under way has ended, and the rest
its own step. Steps of both engines take about the same time, so their ends keep their distance for many
moves: few rounds are few draws of `wait`, and the least and the most are told beside the median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from msgspec.structs import replace
from rich.console import Console

from benchmarks.engines import MODEL
from benchmarks.migration import TOKEN_BYTES, bystander
from benchmarks.moving_pair import QUIET, Pair, Reader, body_of, cold, pair, prompt_of
from benchmarks.report import Cell, Finding, Report, make_parser, publish, this_machine
from kvloom.types.request import Made, StartGenerate
from kvloom.types.verbs import PrepRecv, RemoteSend

LENGTHS: Final = (256, 512, 1024, 2048, 3800)
PARTS: Final = ("step", "hold", "send", "start", "wait", "last", "whole")  # of what is found
FLAT, STEPS, SLOWER = 2.0, 1.0, 10.0  # times over lengths, steps of the batch, per cent
CONTEXT: Final = 4090  # of shape A, or a little less
BEFORE, AFTER = 8, 8  # tokens of the moving request around the move


@dataclass(frozen=True, slots=True)
class Effort:
    """beside: requests that decode at each engine meanwhile."""

    lengths: Sequence[int] = LENGTHS
    rounds: int = 5
    slow: int = 2  # of them, those in which it is computed again too
    beside: int = 8


@dataclass(frozen=True, slots=True)
class Found:
    """Of one move, in seconds. downtime: the request's longest gap, less the usual one. whole: from the order
    to the first token at the target. hold, send, start, last: the parts of the gap; wait: of the last one,
    until the target's step under way had ended. step: the batch's usual gap; slower: by how much the others'
    gaps were longer while it moved, as a part of the usual one. calls: verbs."""

    downtime: float
    whole: float
    hold: float
    send: float
    start: float
    wait: float
    last: float
    step: float
    slower: float
    calls: int


# -- three ways to move -----------------------------------------------------------------------------------


async def live(on: Pair, prompt: list[int], context: int = CONTEXT) -> Found:
    """Through the router, whose stream goes on. context: tokens that the model holds."""
    body, reader = body_of(prompt, context - len(prompt)), Reader()
    on.router.units["target"].withdraw()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(reader.read(on.router.start_generate(body)))
        await reader.until(1)
        await on.router.units["target"].admit()
        found = await _moved(on, reader, lambda: on.router.move(body.request, "target"))
        reading.cancel()
    return found


async def blocking(on: Pair, prompt: list[int]) -> Found:
    """It stands still first, then all is copied."""
    body, reader = body_of(prompt, CONTEXT - len(prompt)), Reader()
    async with asyncio.TaskGroup() as group:

        async def move() -> None:
            [made] = (await on.source.hold(body.request)).made
            await _copy(on, body, [*body.prompt, *made.tokens])
            tasks.append(group.create_task(reader.read(on.target.start_generate(_rest(body, made.tokens)))))
            await on.source.abort(body.request)

        tasks = [group.create_task(reader.read(on.source.start_generate(body)))]
        found = await _moved(on, reader, move)
        for task in tasks:
            task.cancel()
    return found


async def _copy(on: Pair, body: StartGenerate, context: list[int]) -> None:
    """All that has K and V."""
    name, end = f"{body.request}>", len(context) - 1
    room = PrepRecv(model=MODEL, request=name, prompt=context, end=end)
    spot = await on.target.prep_recv(room)
    order = RemoteSend(
        model=MODEL,
        request=body.request,
        prompt=context,
        address=spot.address,
        peer=spot.peer,
        begin=spot.matched,
        end=end,
    )
    await on.source.remote_send(order)
    await on.target.abort(name)  # what has arrived stays cached


async def recompute(on: Pair, prompt: list[int]) -> Found:
    """It ends at the source, and the target computes its context."""
    body, reader = body_of(prompt, CONTEXT - len(prompt)), Reader()
    async with asyncio.TaskGroup() as group:

        async def move() -> None:
            await on.source.abort(body.request)
            await tasks[0]  # all that it had is told
            tokens = reader.tokens[:]
            tasks.append(group.create_task(reader.read(on.target.start_generate(_rest(body, tokens)))))

        tasks = [group.create_task(reader.read(on.source.start_generate(body)))]
        found = await _moved(on, reader, move)
        for task in tasks:
            task.cancel()
    return found


def _rest(body: StartGenerate, tokens: list[int]) -> StartGenerate:
    return replace(body, request=f"{body.request}~", made=[Made(0, tokens)])


async def _moved(on: Pair, reader: Reader, move: Callable[[], Awaitable[None]]) -> Found:
    await reader.until(BEFORE)
    await asyncio.sleep(max(0.0, QUIET - (reader.times[-1] - reader.times[0])))
    began, had = time.perf_counter(), len(on.calls)
    await move()
    made = on.calls[had:]
    asked = next(one.began for one in made if one.verb == "start_generate")
    await reader.until(len(reader.tokens) + AFTER)
    first = next(at for at, when in enumerate(reader.times) if when > asked)
    told, over = reader.times[first - 1], reader.times[first]
    stood = on.answered(began, "hold")
    sent = max(stood, on.answered(stood, "remote_send"))
    let_in = on.answered(sent, "start_generate")
    step = median(on.gaps(began - QUIET, began))
    return Found(
        downtime=max(reader.gaps(began, reader.times[first + 2])) - median(reader.gaps(began - QUIET, began)),
        whole=over - began,
        hold=stood - told,
        send=sent - stood,
        start=let_in - sent,
        wait=on.step_end(let_in, over - step / 2) - let_in,
        last=over - let_in,
        step=step,
        slower=on.slower(began, over),
        calls=sum(one.began <= over for one in made),
    )


WAYS: Final = {"live": live, "blocking": blocking, "recompute": recompute}


async def stranger(on: Pair, length: int, times: int) -> float:
    """How much slower the others are while a process of its own copies as many bytes."""
    slower = []
    async with bystander(length * TOKEN_BYTES, 1) as copy:
        for _ in range(times):
            await asyncio.sleep(QUIET)
            began = time.perf_counter()
            await copy()
            over = time.perf_counter()
            await asyncio.sleep(QUIET)  # the gaps that it is in are over too
            slower.append(on.slower(began, over))
    return median(slower)


# -- the report -------------------------------------------------------------------------------------------


async def measure(effort: Effort, console: Console) -> Report:
    machine = this_machine()
    rows: list[list[Cell]] = []
    raw: dict[str, object] = {}
    lived: list[Found] = []
    for length in effort.lengths:
        console.print(f"a request of {length} tokens", style="dim")
        found: dict[str, list[Found]] = {way: [] for way in WAYS}
        async with pair(effort.beside) as on:
            prompt = prompt_of(length)  # computed once at the source, where it stays cached
            for count in range(effort.rounds + 1):
                for way, move in WAYS.items():
                    if way == "recompute" and not effort.rounds - effort.slow < count:
                        continue
                    await cold(on)
                    one = await move(on, prompt)
                    if count:  # memory is touched for the first time in the first round
                        found[way].append(one)
            foreign = await stranger(on, length, effort.rounds)
        raw[str(length)] = {way: [asdict(one) for one in some] for way, some in found.items()}
        mid = {way: _median(some) for way, some in found.items()}
        lived.append(mid["live"])
        ways = [1e3 * one.downtime for one in mid.values()]
        it = mid["live"]
        parts = [1e3 * float(getattr(it, name)) for name in PARTS]
        lives = [1e3 * one.downtime for one in found["live"]]
        rows.append([length, *ways, min(lives), max(lives), *parts, it.calls, 100 * it.slower, 100 * foreign])
    return Report(
        name="downtime",
        title=f"A request moves, {effort.beside} others at each engine (ms, medians of {effort.rounds})",
        columns=[
            "context",
            *WAYS,
            "least",
            "most",
            "step",
            "hold",
            "send",
            "start",
            "wait",
            "last",
            "whole",
            "verbs",
            "slower %",
            "memcpy %",
        ],
        rows=rows,
        findings=_findings(lived, rows),
        machine=machine,
        notes=[
            "Downtime: the longest gap between its tokens around the move, less the usual one, step. Of that "
            "gap: hold, from the source's last token to the answer that it stands still; send, until all has "
            "arrived; start, until the target has let it in; last, to its first token there; wait, of the "
            "last one, until the target's step under way has ended. Least, most: live downtime. Slower: the "
            "others' gaps while it moves, against before. Memcpy: the same while a process of its own copies "
            "as many bytes, at once."
        ],
        raw=raw,
    )


def _median(some: list[Found]) -> Found:
    """Field by field."""
    return Found(**{name: median(getattr(one, name) for one in some) for name in Found.__slots__})


def _findings(lived: list[Found], rows: list[list[Cell]]) -> list[Finding]:
    step = median(one.step for one in lived)
    downtimes = [max(one.downtime, 0.0) for one in lived]
    # Gaps count, not what is left of them: a downtime near nothing would make any other many times as long.
    flat = max(one.downtime + step for one in lived) / min(one.downtime + step for one in lived)
    gained = [min(float(row[2] or 0), float(row[3] or 0)) / max(float(row[1] or 0), 1e-3) for row in rows]
    return [
        Finding(what="longest gap, the longest over lengths against the shortest", value=flat, unit="×",
                most=FLAT),
        Finding(what="downtime at worst", value=max(downtimes) / step, unit=" steps", most=STEPS),
        Finding(what="others slower while one moves, at worst",
                value=100 * max(one.slower for one in lived), unit=" %", most=SLOWER),
        Finding(what="downtime against the better of blocking and recompute, at the longest",
                value=gained[-1], unit="×"),
    ]  # fmt: skip


def main() -> None:
    usual = Effort()
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=usual.lengths)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--beside", type=int, default=usual.beside, help="requests at each engine")
    options = parser.parse_args()
    console = Console()
    effort = Effort(options.lengths, options.rounds, options.beside)
    publish(asyncio.run(measure(effort, console)), console)


if __name__ == "__main__":
    main()
