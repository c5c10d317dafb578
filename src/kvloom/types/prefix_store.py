"""A store in which cached pages of K and V outlive their blocks, and the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloom.types.geometry import I32, AnyArray


@dataclass(frozen=True, slots=True)
class PageName:
    """The name of a full page in a store (`kv/page_keys.py`)."""

    model: str
    root: bytes
    """Names all that is cached for the model with one salt."""
    key: bytes
    """Names the page's tokens and all before them, and the salt."""


class PrefixStore(Protocol):
    """Keeps copies of pages. Its methods are called on one event loop. None of them raises, whatever becomes
    of what is behind it: a page that cannot be kept is not found later, and that is all."""

    def save(self, name: PageName, blocks: I32) -> bool:
        """Copies the page in these blocks [layers, kv_heads], which may be used for others at once, and keeps
        it if it can. Returns False, with nothing done, if there is no room for the copy now."""

    async def written(self) -> None:
        """Waits until each page that was saved is kept or given up."""

    async def read(self, names: Sequence[PageName]) -> list[AnyArray]:
        """Returns the first of these pages, all of one model and salt: at least one if the first is there,
        and none after one that is not. It may take as long as a disk that hangs."""

    def place(self, model: str, pages: Sequence[AnyArray], blocks: I32) -> None:
        """Copies pages that `read` has returned into these blocks [pages, layers, kv_heads]."""

    def forget(self, model: str, root: bytes = b"", keys: Sequence[bytes] = ()) -> None:
        """Gives up the pages with these keys, soon; without keys all of the root, without a root all of the
        model."""

    def close(self) -> None:
        """Ends the store's threads, but waits for none that hangs. Nothing is called any more."""
