"""The keys with names that a gateway knows, and the file in which they change while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvloom.api.access.tenants import Tenant
from kvloom.config.keys import NamedKey, find_key, parse_keys, read_key_text
from kvloom.types.clock import Clock
from kvloom.types.files import FileWatch, replacing

LOOK_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class KeyRing:
    """Keys with names. A name keeps the counts of what it has used, even if its key or its limits change."""

    def __init__(
        self,
        keys: Mapping[str, NamedKey],
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
    ) -> None:
        """clock: tells seconds; date: tells seconds since 1970, UTC."""
        self._clock = clock
        self._date = date
        self._keys: Mapping[str, NamedKey] = {}
        self.tenants: dict[str, Tenant] = {}
        self.has_admin = False
        self.replace(keys)

    def replace(self, keys: Mapping[str, NamedKey]) -> None:
        """Lets these be the keys, from the next request on."""
        known, self.tenants = self.tenants, {}
        for name, key in keys.items():
            tenant = self.tenants[name] = known.get(name) or Tenant(key, self._clock)
            tenant.key = key
        self._keys = keys
        self.has_admin = any(key.admin for key in keys.values())

    def find(self, given: bytes) -> Tenant | None:
        """Returns the tenant whose key was given, whether or not it has expired."""
        key = find_key(self._keys, given)
        return None if key is None else self.tenants[key.name]

    def check_expiry(self, tenant: Tenant) -> bool:
        """Returns whether a tenant's key has expired. If it has, counts the refusal."""
        over = tenant.key.expired(self._date())
        if over:
            tenant.counts.refuse("expired")
        return over


class KeyFile:
    """A file of keys, followed while it changes. The last text of it that could be read is kept, so that a
    gateway that takes another one's place knows the same keys, whatever the file has become."""

    def __init__(self, path: Path, kept: Path) -> None:
        """kept: the file in which the text is kept, in the fleet's own folder."""
        self._path = path
        self._kept = kept
        self._watch = FileWatch(path)

    def open(self) -> KeyRing:
        """Returns the keys in the file, or those kept. Nobody has a key if neither can be read."""
        self._watch.changed()  # What is read now is known.
        try:
            return KeyRing(self._read())
        except ValueError as error:
            _log.error("%s; the keys of before stay", error)
        with suppress(ValueError):
            return KeyRing(parse_keys(read_key_text(self._kept), self._kept))
        _log.error("%s: no keys are known of before, so nobody has one until the file is right", self._path)
        return KeyRing({})

    async def follow(
        self, ring: KeyRing, clock: Clock, changed: Callable[[list[str], list[str]], object]
    ) -> None:
        """Reads the file again whenever it has changed, for ever. changed: is told the names before and
        after."""
        while True:
            await clock.sleep(LOOK_SECONDS)
            await self.read_again(ring, changed)

    async def read_again(self, ring: KeyRing, changed: Callable[[list[str], list[str]], object]) -> None:
        """Reads the file again if it has changed. One that cannot be read changes nothing, but is told in the
        log once."""
        if not await asyncio.to_thread(self._watch.changed):
            return
        try:
            keys = await asyncio.to_thread(self._read)
        except ValueError as error:
            _log.error("%s; the keys of before stay", error)
            return
        before = list(ring.tenants)
        ring.replace(keys)
        _log.info("%s: read again; keys: %d", self._path, len(keys))
        changed(before, list(keys))

    def _read(self) -> dict[str, NamedKey]:
        """Raises ValueError."""
        text = read_key_text(self._path)
        keys = parse_keys(text, self._path)
        try:
            with replacing(self._kept) as file:
                file.write(text.encode())
        except OSError as error:
            _log.warning(
                "%s: %s; it would have kept the keys for another gateway", self._kept, error.strerror
            )
        return keys
