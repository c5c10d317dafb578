"""How anyone calls an engine: over HTTP in the real world, directly in the simulated one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, TypeVar

from kvloom.types.load import UnitLoad
from kvloom.types.request import Event, ModelCard, StartGenerate
from kvloom.types.service import Service
from kvloom.types.verbs import (
    Held,
    Lease,
    Offer,
    Offered,
    Pin,
    Pinned,
    Prefix,
    Prepared,
    PrepRecv,
    RemoteSend,
    Sent,
    Standing,
)

Item_co = TypeVar("Item_co", covariant=True)


class Stream(Protocol[Item_co]):
    """An asynchronous iterator that can be closed before its end, as every async generator can."""

    def __aiter__(self) -> AsyncIterator[Item_co]: ...

    async def __anext__(self) -> Item_co: ...

    async def aclose(self) -> None: ...


Frames = Stream[list[Event]]
"""A request's answer: each frame holds the events that reach the caller at once."""


class Generator(Protocol):
    """Whoever answers requests. Every method raises KvloomError: the engine's own, or Unavailable where it
    cannot be reached."""

    async def models(self) -> list[ModelCard]:
        """The models that are served."""

    def start_generate(self, body: StartGenerate) -> Frames:
        """Returns frames of events, until each choice has had its EndEvent. Closing the stream early aborts
        the request and gives its blocks back within one job. Errors of admission are raised on the first
        step, before any event."""

    async def abort(self, request: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, and give back what it has reserved or pinned, wherever it
        stands; unknown or ended ones are fine."""


class Server(Generator, Protocol):
    """Many engines, to a gateway as one."""

    async def loads(self) -> dict[str, UnitLoad]:
        """By unit, of those that answer."""

    @property
    def services(self) -> Mapping[str, Service]:
        """By unit."""


class EngineClient(Generator, Protocol):
    """One engine: the verbs (Microserving, section 3.1), each described by its body in core.verbs."""

    async def prep_recv(self, body: PrepRecv) -> Prepared: ...

    async def remote_send(self, body: RemoteSend) -> Sent: ...

    async def renew(self, request: str) -> Lease:
        """Raises BadRequest where nothing is reserved or pinned for `request`."""

    async def pin(self, body: Pin) -> Pinned:
        """Raises OutOfBlocks where the longest request would find no room beside what is promised."""

    async def unpin(self, request: str) -> Held:
        """Unknown requests are fine."""

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        """See `Hold`. Raises BadRequest where the request is not here, has ended, or has yet to begin; where
        a send has failed it stands still all the same."""

    async def resume(self, request: str) -> None:
        """Requests that were not held are fine."""

    async def offer(self, body: Offer) -> Offered: ...

    async def evict(self, body: Prefix) -> Held:
        """Drop what is cached of the prefix and past it, as far as nobody uses it."""

    async def load(self) -> UnitLoad: ...
