"""What a weaver says and does on whatever device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.offload import Borrow


def one_number(model: str, heads: int) -> int:
    """heads: of q, in all layers of the model; 0 where they differ. Raises BadRequest then."""
    if not heads:
        raise BadRequest(f"weave: the layers of {model} differ in their heads, so no one mailbox fits them")
    return heads


@contextmanager
def watched(borrow: Borrow) -> Iterator[None]:
    """While the borrower's process is opened, to see its end. Raises Unavailable where it cannot be."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"weave: process {borrow.pid}, which wants to borrow, cannot be watched: {error.strerror}"
        ) from error


def on_this_loop(ended: Callable[[str], None]) -> Callable[[str], None]:
    """`ended` from any thread, on the loop that runs now."""
    loop = asyncio.get_running_loop()
    return lambda why: _call_soon(loop, ended, why)


def _call_soon(loop: asyncio.AbstractEventLoop, ended: Callable[[str], None], why: str) -> None:
    loop.call_soon_threadsafe(ended, why)
