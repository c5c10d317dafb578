"""Answers of /v1/responses that are kept, so that later requests can go on from them or read them again.

They are in this process's memory and nowhere else: another gateway does not know them, and a restart forgets
them. What is kept are items and not tokens, because the model that is asked next decides their template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from kvloom.types.errors import BadRequest, KvloomError

MAX_RESPONSES: Final = 4096
"""A busy agent makes some thousand turns an hour, and needs the last of them only."""
MAX_BYTES: Final = 64 << 20
"""A third of what requests under way may hold (`api.bodies.MAX_HELD`): some hundred long conversations."""
ENTRY_BYTES: Final = 1 << 10
"""The bytes that an answer takes beside its texts: objects, names, and its places in tables."""


class ResponseNotFound(KvloomError):
    code: ClassVar[str] = "response_not_found"
    status: ClassVar[int] = 404


class PreviousNotFound(BadRequest):
    code: ClassVar[str] = "previous_response_not_found"


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One answer: a turn of a conversation."""

    name: str
    tenant: str
    before: StoredResponse | None
    """The answer that it went on from, which it keeps, whether or not that can still be asked for."""
    given: bytes
    """The items that its request added to the conversation, as JSON."""
    answer: bytes
    """The answer as it was sent, as JSON."""
    holders: int = 0
    """How many keep it: the table of answers, and those that went on from it."""

    @property
    def bytes_held(self) -> int:
        return ENTRY_BYTES + len(self.given) + len(self.answer)

    def turns(self) -> list[StoredResponse]:
        """Returns the conversation up to this answer, from its beginning."""
        found = [*self._back()]
        found.reverse()
        return found

    def _back(self) -> Iterator[StoredResponse]:
        at: StoredResponse | None = self
        while at is not None:
            yield at
            at = at.before


class ResponseStore:
    """The answers that are kept, of each tenant its own. Above its bounds it forgets the oldest answer of the
    tenant that has the largest part of either bound (its dominant share: Ghodsi et al., "Dominant Resource
    Fairness", NSDI 2011), so that nobody's answers push out those of a tenant that has fewer."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._tables: dict[str, dict[str, StoredResponse]] = {}  # by tenant, the oldest first; none is empty
        self._bytes: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def bytes_held(self) -> int:
        return sum(self._bytes.values())

    def find(self, tenant: str, name: str) -> StoredResponse | None:
        return self._tables.get(tenant, {}).get(name)

    def get(self, tenant: str, name: str) -> StoredResponse:
        """Raises ResponseNotFound, also for an answer of another tenant's."""
        found = self.find(tenant, name)
        if found is None:
            raise ResponseNotFound(f"Response with id '{name[:200]}' not found.")
        return found

    def keep(self, response: StoredResponse) -> None:
        self._hold(response)
        self._tables.setdefault(response.tenant, {})[response.name] = response
        while self.count > self._most or self.bytes_held > self._most_bytes:
            tenant = max(self._tables, key=self._share)
            self.forget(next(iter(self._tables[tenant].values())))

    def forget(self, response: StoredResponse) -> None:
        """Forgets an answer that is in the table. Later ones that went on from it keep its texts."""
        table = self._tables[response.tenant]
        del table[response.name]
        if not table:
            del self._tables[response.tenant]
        self._release(response)

    def _share(self, tenant: str) -> float:
        return max(len(self._tables[tenant]) / self._most, self._bytes[tenant] / self._most_bytes)

    def _hold(self, response: StoredResponse | None) -> None:
        while response is not None:
            response.holders += 1
            if response.holders > 1:
                return
            self._bytes[response.tenant] += response.bytes_held
            response = response.before

    def _release(self, response: StoredResponse | None) -> None:
        while response is not None:
            response.holders -= 1
            if response.holders:
                return
            self._bytes[response.tenant] -= response.bytes_held
            if not self._bytes[response.tenant]:
                del self._bytes[response.tenant]
            response = response.before
