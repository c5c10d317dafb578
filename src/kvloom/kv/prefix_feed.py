"""Tells what a unit's prefix caches hold, for those who send it requests: names of pages, and changes.

A full page is named by a digest over the model, the salt and all tokens from the first to its last, so equal
prefixes have equal names on every unit, and a name says neither what was asked nor by whom.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

from kvloom.types.verbs import CacheChanges, CachedSince

NAME_BYTES: Final = 8
MOST_CHANGES: Final = 1 << 14  # remembered for those who ask what is new
LEAST_CHANGES: Final = 64  # remembered whatever is held
MOST_NAMED: Final = 1 << 16  # pages that an answer names


_MARK: Final = "\0"  # after an adapter's name and digest in a salt; callers' salts are beside them


def adapter_salt(adapter: str, digest: str, salt: str) -> str:
    """Returns the salt with which prefixes of an adapter are cached beside its base's. They have K and V of
    their own, which two adapters of one name have not in common. digest: of the adapter's weights."""
    return f"{adapter}{_MARK}{digest}{_MARK}{salt}"


def covers(salt: str, other: str) -> bool:
    """Returns whether a salt stands for another one, too, if nothing else is named: the empty one for all,
    that of an adapter's requests without a salt for all of the adapter."""
    return not salt or (salt.count(_MARK) == 2 and salt.endswith(_MARK) and other.startswith(salt))


def root_name(model: str, width: int, salt: str) -> bytes:
    """Returns the name before that of the first page, for pages of `width` tokens that are cached for a model
    with a salt. It is never told. Those of an adapter have the name that they have for whoever knows the
    adapter as a model."""
    if salt.count(_MARK) >= 2:
        model, _, salt = salt.split(_MARK, 2)
    return blake2b(repr((model, width, salt)).encode(), digest_size=NAME_BYTES).digest()


def page_name(before: bytes, run: Sequence[int]) -> bytes:
    """Returns the name of the page that holds `run` after the page, or the root, of the name `before`."""
    return blake2b(before + array("i", run).tobytes(), digest_size=NAME_BYTES).digest()


def split_names(names: bytes) -> Iterator[bytes]:
    for at in range(0, len(names), NAME_BYTES):
        yield names[at : at + NAME_BYTES]


class PrefixFeed:
    """The names of the full pages that the caches of one unit hold, and which have come and gone lately."""

    def __init__(self, most_changes: int = MOST_CHANGES, most_named: int = MOST_NAMED) -> None:
        self._life = secrets.token_hex(NAME_BYTES)
        self._most_named = most_named
        self._held: dict[bytes, None] = {}  # each after the page before it
        self._log: deque[bytes] = deque(maxlen=most_changes)  # what has come or gone
        self._version = 0

    @property
    def held(self) -> frozenset[bytes]:
        return frozenset(self._held)

    def insert(self, name: bytes) -> None:
        self._held[name] = None
        self._changed(name)

    def drop(self, name: bytes) -> None:
        del self._held[name]
        self._changed(name)

    def changes(self, body: CachedSince) -> CacheChanges:
        """Returns what has changed since the version that the body names, or all that is held if that was of
        another process or is too long ago. At most `most_named` pages are named as held."""
        behind = self._version - body.version
        whole = body.life != self._life or not 0 <= behind <= len(self._log)
        if whole:
            come, gone = list(self._held), list[bytes]()
        else:
            changed = [self._log[at] for at in range(-behind, 0)]
            latest = dict.fromkeys(reversed(changed))  # each where it changed last, the latest first
            come = [name for name in reversed(latest) if name in self._held]
            gone = [name for name in latest if name not in self._held]
        return CacheChanges(
            life=self._life,
            version=self._version,
            whole=whole,
            come=b"".join(come[: self._most_named]),
            gone=b"".join(gone),
        )

    def _changed(self, name: bytes) -> None:
        self._log.append(name)
        self._version += 1
        if len(self._log) > LEAST_CHANGES + 2 * len(self._held):
            self._log.popleft()  # It takes less to tell all that is held than so many changes.
