"""The programs that are shipped: what the router does with a request, as generators over the verbs.

A new program is a function here and its name in `PROGRAMS`, and in `MOVING` if it moves K and V. Its keyword
arguments are its options. Users write theirs in modules of their own (docs/programs.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta

from kvloom.router.replicas import Fleet
from kvloom.router.session import Session
from kvloom.types.client import Frames

Replicas = Annotated[int, Meta(ge=1)]
Tokens = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]


async def data_parallel(call: Session, fleet: Fleet) -> Frames:
    """Requests go to the replicas in turn."""
    async for frame in call.start_generate(fleet.turn()):
        yield frame


async def least_loaded(call: Session, fleet: Fleet) -> Frames:
    """Sends each request to the replica that has the least to do."""
    async for frame in call.start_generate(fleet.least_loaded()):
        yield frame


async def freest(call: Session, fleet: Fleet) -> Frames:
    """Sends each request to the replica whose unit has room for the most decode steps of its batch."""
    async for frame in call.start_generate(fleet.freest()):
        yield frame


async def infaas(call: Session, fleet: Fleet) -> Frames:
    """Sends each request to the replica whose unit has the least memory in use (INFaaS++ of Llumnix, section
    6.1)."""
    async for frame in call.start_generate(fleet.emptiest()):
        yield frame


async def disaggregate(call: Session, fleet: Fleet, *, prefill: Replicas = 1) -> Frames:
    """Lets the first `prefill` replicas prefill and the others decode, each in turn."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.turn(decoders), 0
    if prefillers:
        source, begin = fleet.turn(prefillers), -1
        spot = await call.prep_recv(target, end=-1, sender=source)
        await call.remote_send(source, spot, end=-1)
    async for frame in call.start_generate(target, begin=begin):
        yield frame


async def cache_aware_disaggregate(
    call: Session, fleet: Fleet, *, prefill: Replicas = 1, slack: Tokens = 2048
) -> Frames:
    """Does as `disaggregate`, with the prefiller and the decoder that hold most of the prompt; what the
    decoder has matched is not sent."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.nearest(call.prompt, decoders, slack=slack), 0
    if prefillers:
        source, begin = fleet.nearest(call.prompt, prefillers, slack=slack), -1
        spot = await call.prep_recv(target, end=-1, sender=source)
        await call.remote_send(source, spot, begin=spot.matched, end=-1)
    async for frame in call.start_generate(target, begin=begin):
        yield frame


async def balanced(
    call: Session, fleet: Fleet, *, prefill: Replicas = 1, ratio: Ratio | None = None, most: Ratio = 0.5
) -> Frames:
    """Does as `disaggregate`, but the decoder computes the last `ratio` of the prompt; without a ratio, half
    of what the prefiller has waiting more than the decoder, up to `most` of the prompt."""
    prefillers, decoders = fleet.split(prefill)
    target, begin = fleet.least_loaded(decoders), 0
    if prefillers:
        source, length = fleet.least_loaded(prefillers), len(call.prompt)
        if ratio is None:
            ratio = min(most, max(0, source.queue - target.queue) / 2 / length)
        begin = min(length - 1, round(length * (1 - ratio)))
    if begin:
        spot = await call.prep_recv(target, end=begin, sender=source)
        await call.remote_send(source, spot, begin=spot.matched, end=begin)
    async for frame in call.start_generate(target, begin=begin):
        yield frame


async def cache_aware(call: Session, fleet: Fleet, *, slack: Tokens = 2048, copies: Replicas = 1) -> Frames:
    """Sends a request to the replica that holds the longest prefix of it, unless that replica has `slack`
    tokens more to do than the least loaded. With `copies` above 1, a prefix that many requests begin with is
    copied to up to so many replicas, by its use."""
    if copies > 1:
        fleet.spread(call.prompt, copies)
    async for frame in call.start_generate(fleet.nearest(call.prompt, slack=slack)):
        yield frame


async def migrate_context(call: Session, fleet: Fleet, *, slack: Tokens = 256) -> Frames:
    """Sends a request to its context; if the replica there has `slack` tokens more to do than the least
    loaded one, the context moves there first, unless it takes less time to compute it there again."""
    held, target, begin = fleet.matched(call.prompt), fleet.least_loaded(), 0
    source = max(held, key=lambda replica: held[replica], default=target)
    if source.load <= target.load + slack:
        target = source
    elif held[source] > held.get(target, 0):
        end = min(held[source], len(call.prompt) - 1)
        if fleet.copies_sooner(source, target, end - held.get(target, 0)):
            begin = end
            spot = await call.prep_recv(target, end=begin, sender=source)
            await call.remote_send(source, spot, begin=spot.matched, end=begin)
    async for frame in call.start_generate(target, begin=begin):
        yield frame


PROGRAMS: Final[dict[str, Callable[..., Frames]]] = {
    program.__name__: program
    for program in (
        data_parallel,
        least_loaded,
        freest,
        infaas,
        disaggregate,
        cache_aware_disaggregate,
        balanced,
        cache_aware,
        migrate_context,
    )
}

MOVING: Final = frozenset({"disaggregate", "cache_aware_disaggregate", "balanced", "migrate_context"})
"""The programs that move K and V from unit to unit."""


def name_problem(name: str) -> str:
    """Returns why a name names no program, and what would be right; nothing if it is that of a program, or
    of a module's function."""
    module, _, function = name.partition(":")
    if name in PROGRAMS or (module and function):
        return ""
    return f"{name!r} is not known; {', '.join(PROGRAMS)}, or `my_module:my_program` is right"
