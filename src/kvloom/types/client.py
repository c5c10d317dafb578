"""Protocols by which engines are called: over HTTP in the real world, directly in the simulated one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from kvloom.types.load import UnitLoad
from kvloom.types.request import Event, ModelCard, StartGenerate
from kvloom.types.service import Service
from kvloom.types.verbs import (
    CacheChanges,
    CachedSince,
    CheckModel,
    Evicted,
    Held,
    Lease,
    LoadAdapter,
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
    UnloadAdapter,
)

Item_co = TypeVar("Item_co", covariant=True)


class ClosableStream(Protocol[Item_co]):
    """An asynchronous iterator that can be closed before its end, as every async generator can."""

    def __aiter__(self) -> AsyncIterator[Item_co]: ...

    async def __anext__(self) -> Item_co: ...

    async def aclose(self) -> None: ...


Frames = ClosableStream[list[Event]]
"""A request's answer: each frame holds the events that reach the caller at once."""


class Generator(Protocol):
    """A server of models. Every method raises KvloomError: the engine's own error, or Unavailable if the
    engine cannot be reached."""

    async def models(self) -> list[ModelCard]:
        """Returns the cards of the models that are served."""

    def start_generate(self, body: StartGenerate) -> Frames:
        """Returns frames of events, until each choice has had its EndEvent.

        Closing the stream early aborts the request and gives its blocks back within one job. Errors of
        admission are raised on the first step, before any event.
        """

    async def abort(self, request: str, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, and gives back what it has reserved or pinned. Unknown and
        ended requests are fine."""


class ModelServer(Generator, Protocol):
    """Many engines that a gateway calls as one."""

    async def loads(self) -> dict[str, UnitLoad]:
        """Returns the load of each unit that answers, by the unit's name."""

    @property
    def services(self) -> Mapping[str, Service]:
        """The state of each unit, by the unit's name."""

    @property
    def choices(self) -> Mapping[tuple[str, str], int]:
        """Tells how often K and V were copied, or computed again, by what was to be moved and by the
        reason."""

    @property
    def waiting(self) -> Mapping[str, int]:
        """The number of requests that no unit can answer yet, by model."""

    @property
    def awaited(self) -> Collection[str]:
        """The units that take no requests now, but will, so that requests wait for them."""


class EngineClient(Generator, Protocol):
    """An engine, called by its verbs (Microserving, section 3.1). The body of a verb, in `types.verbs`, says
    what the verb does."""

    async def prep_recv(self, body: PrepRecv) -> Prepared: ...

    async def remote_send(self, body: RemoteSend) -> Sent: ...

    async def renew(self, request: str) -> Lease:
        """Renews the leases of `request`. Raises BadRequest if nothing is reserved or pinned for it."""

    async def pin(self, body: Pin) -> Pinned:
        """Raises OutOfBlocks if the longest request would find no room beside what is promised."""

    async def unpin(self, request: str) -> Held:
        """Undoes the pin of `request`. Unknown requests are fine."""

    async def hold(self, request: str, sends: Sequence[RemoteSend] = ()) -> Standing:
        """Pauses a request, as `Hold` says. Raises BadRequest if the request is not here, has ended, or has
        yet to begin. If a send fails, the request is paused all the same."""

    async def resume(self, request: str) -> None:
        """Lets a paused request go on. Requests that were not paused are fine."""

    async def offer(self, body: Offer) -> Offered: ...

    async def evict(self, body: Prefix) -> Evicted:
        """Drops what is cached of the prefix and past it, as far as nobody uses it."""

    async def contents(self, body: CachedSince) -> CacheChanges: ...

    async def load(self) -> UnitLoad: ...

    async def load_adapter(self, body: LoadAdapter) -> None:
        """Serves another adapter, once it is proven; the same again is fine. Raises BadRequest if it cannot
        be served, and Conflict for a name that is taken."""

    async def unload_adapter(self, body: UnloadAdapter) -> None:
        """Serves no new request of an adapter; those that are here run to their end. Raises UnknownModel."""

    async def check_model(self, body: CheckModel) -> None:
        """Reads a model's files, all but its weights. Raises BadRequest if they cannot be served."""
