"""The store of prefixes whose pages lie in files. A thread writes and another one reads, so that a disk that
hangs holds up nobody else; both are daemons, so that the process can end all the same."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

import numpy as np

from kvloom.kv.arena import Arena
from kvloom.transfer.disk.folder import IDENTITY_BYTES, PagePlace, PrefixFolder
from kvloom.types.geometry import I32, AnyArray, Geometry, over_ranks
from kvloom.types.prefix_store import PageName
from kvloom.types.spec import EngineSpec

MOST_STAGED: Final = 256 << 20  # bytes of copies that wait to be written
STAGED_PART: Final = 8  # of the pool is the most that they are, too
BATCH: Final = 8 << 20  # bytes of pages that a read returns, or one page
MOST_KNOWN: Final = 1 << 16  # pages that are known to be kept, and not copied again
PAUSE: Final = 30.0  # seconds for which nothing is written after an error
END_SECONDS: Final = 1.0  # for which `close` waits for a thread

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model whose pages are kept."""

    identity: bytes
    """Names its weights, and what else its K and V depend on."""
    geometry: Geometry

    @property
    def row(self) -> int:
        """Returns the bytes of a block that tokens use."""
        return self.geometry.tokens_per_block * self.geometry.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.geometry.blocks_per_page * self.geometry.ranks * self.row


class Worker:
    """A thread that does one thing after the other, until it is closed."""

    def __init__(self, name: str) -> None:
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, order: Callable[[], None]) -> None:
        """Queues an order, which must not raise."""
        self._orders.put(order)

    def close(self) -> None:
        """Ends the thread after all that is queued, but does not wait for long."""
        self._orders.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()


class DiskPrefixStore:
    """Satisfies `PrefixStore` over a folder and a unit's arena."""

    def __init__(
        self,
        folder: PrefixFolder,
        arena: AnyArray,
        models: Mapping[str, KeptModel],
        *,
        rank_blocks: int,
        staging: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """arena: [blocks, bytes of a block], of all ranks. rank_blocks: blocks of each of them. staging:
        bytes of copies that wait to be written, or one page. now: tells the seconds for pauses."""
        self._folder = folder
        self._arena = arena
        self._models = models
        self._rank_blocks = rank_blocks
        self._staging = staging
        self._now = now
        self._lock = threading.Lock()
        self._staged = 0
        self._known: dict[PagePlace, None] = {}
        self._resume = now()  # when writing goes on
        self._ill = set[str]()  # what has failed when it was last done
        self._writer, self._reader = Worker("cache-writer"), Worker("cache-reader")

    # -- writing --------------------------------------------------------------------------------------

    def save(self, name: PageName, blocks: I32) -> bool:
        model, place = self._models[name.model], self._place(name)
        size = model.page_bytes
        with self._lock:
            if place in self._known or self._now() < self._resume:
                return True
            if self._staged and self._staged + size > self._staging:
                return False
            self._staged += size
            self._know(place)
        page = np.ascontiguousarray(self._arena[self._rows(model, blocks), : model.row])
        self._writer.do(lambda: self._write(place, page))
        return True

    def _write(self, place: PagePlace, page: AnyArray) -> None:
        try:
            if self._now() >= self._resume:
                self._folder.write(place, page)
                self._ill.discard("written")
            else:
                self._unknow(place)
        except OSError as error:
            self._unknow(place)
            self._resume = self._now() + PAUSE
            self._complain("written", error)
        finally:
            with self._lock:
                self._staged -= page.nbytes

    async def written(self) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._writer.do(lambda: _tell(loop, done, None))
        await done

    def forget(self, model: str, root: bytes = b"", keys: Sequence[bytes] = ()) -> None:
        identity = self._models[model].identity
        with self._lock:
            gone = [
                place
                for place in self._known
                if place.identity == identity
                and root in (b"", place.root)
                and (not keys or place.key in keys)
            ]
            for place in gone:
                del self._known[place]
        self._writer.do(lambda: self._forget(identity, root, tuple(keys)))

    def _forget(self, identity: bytes, root: bytes, keys: tuple[bytes, ...]) -> None:
        try:
            self._folder.forget(identity, root, keys)
        except OSError as error:
            self._complain("removed", error)

    # -- reading --------------------------------------------------------------------------------------

    async def read(self, names: Sequence[PageName]) -> list[AnyArray]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[AnyArray]] = loop.create_future()
        size = self._models[names[0].model].page_bytes
        places = [self._place(name) for name in names[: max(1, BATCH // size)]]
        self._reader.do(lambda: _tell(loop, done, self._read(places, size)))
        return await done

    def _read(self, places: Sequence[PagePlace], size: int) -> list[AnyArray]:
        pages = list[AnyArray]()
        for place in places:
            try:
                page = self._folder.read(place, size)
                self._ill.discard("read")
            except (OSError, MemoryError) as error:
                self._complain("read", error)
                break
            if page is None:
                self._unknow(place)
                break
            pages.append(page)
            with self._lock:
                self._know(place)
        return pages

    def place(self, model: str, pages: Sequence[AnyArray], blocks: I32) -> None:
        kept = self._models[model]
        for page, into in zip(pages, blocks, strict=True):
            self._arena[self._rows(kept, into), : kept.row] = page.reshape(-1, kept.row)

    # -- both -----------------------------------------------------------------------------------------

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def _rows(self, model: KeptModel, blocks: I32) -> I32:
        """Returns the blocks [n] of a page in the arena, given the first rank's [layers, kv_heads]."""
        return over_ranks(blocks, model.geometry.ranks, self._rank_blocks).ravel()

    def _place(self, name: PageName) -> PagePlace:
        return PagePlace(self._models[name.model].identity, name.root, name.key)

    def _know(self, place: PagePlace) -> None:
        self._known[place] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _unknow(self, place: PagePlace) -> None:
        with self._lock:
            self._known.pop(place, None)

    def _complain(self, what: str, error: OSError | MemoryError) -> None:
        """Tells the log once, until it works again."""
        if what not in self._ill:
            self._ill.add(what)
            _log.warning(
                "cache_dir: %s: nothing can be %s: %s",
                *(self._folder.path, what, getattr(error, "strerror", None) or repr(error)),
            )


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T], result: _T) -> None:
    """Gives a future its result, on the loop that waits for it."""

    def tell() -> None:
        if not future.done():
            future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed, and with it all who waited
        loop.call_soon_threadsafe(tell)


def open_disk_store(
    spec: EngineSpec,
    arena: Arena,
    geometries: Mapping[str, Geometry],
    identities: Mapping[str, str],
    rank_blocks: int,
) -> DiskPrefixStore:
    """Returns the store of a unit in the folder that its specification names. identities: what tells each
    model's K and V from others'; rank_blocks: the blocks of each rank."""
    assert spec.cache_dir is not None, "whoever has no folder has no store"
    models = {
        name: KeptModel(_identity(identities[name], geometry), geometry)
        for name, geometry in geometries.items()
    }
    size = arena.blocks * arena.block_bytes
    blocks: AnyArray = arena.bytes[:size].numpy().reshape(arena.blocks, arena.block_bytes)
    staging = min(MOST_STAGED, size // STAGED_PART)
    folder = PrefixFolder(Path(spec.cache_dir), spec.cache_size)
    return DiskPrefixStore(folder, blocks, models, rank_blocks=rank_blocks, staging=staging)


def _identity(model: str, geometry: Geometry) -> bytes:
    return hashlib.sha256(repr((model, geometry)).encode()).digest()[:IDENTITY_BYTES]
