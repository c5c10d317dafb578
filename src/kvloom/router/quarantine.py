"""The quarantine of requests of which engines die, so that none of them can end them all."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import Final

import msgspec
from msgspec.structs import replace

from kvloom.journal.records import Quarantined, Recorder, nobody, short
from kvloom.router.progress import RequestProgress
from kvloom.types.clock import Clock
from kvloom.types.errors import EngineDied, KvloomError, RequestQuarantined, Unavailable
from kvloom.types.request import StartGenerate

DEATHS_BEFORE: Final = 2
"""So many engines may die of a request that has no token yet: the first may have been killed by somebody
else, and what its grammar or its prompt does to an engine it does before its first token."""
DEATHS_AFTER: Final = 4
"""So many engines may die of a request that has tokens, without one more in between. What it does to an
engine it would most likely have done before, and its caller has seen a part of the answer; so it is trusted
for longer. A token more says that what the last engine died at has been computed elsewhere."""
DEATHS_IN_ALL: Final = 16
"""So many engines may die while they have a request, whatever it made in between."""
WAITED, COMPUTED = 1, 2
"""The weights of deaths: one at which the request seemed to wait for its turn counts half. It may have waited
behind another request that killed the engine; or it was the killer, and the engine died before it could tell
that it had begun."""
QUARANTINE_SECONDS: Final = 600.0
"""The time for which a quarantined request is refused if its client sends it again."""
MOST_QUARANTINED: Final = 256
"""Requests that are remembered for that."""

_SHOWN: Final = 16  # digits of a digest
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)


class Quarantine:
    """The digests of the requests that were quarantined lately."""

    def __init__(self, clock: Clock, record: Recorder = nobody) -> None:
        """record: takes quarantines to the journal."""
        self.record = record
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def check(self, body: StartGenerate) -> None:
        """Raises RequestQuarantined if the same request was quarantined lately."""
        if not self._until:
            return
        digest = _digest(body)
        left = self._until.get(digest, 0.0) - self._clock.now()
        if left > 0.0:
            raise RequestQuarantined(
                f"this request was quarantined because engines died of it ({digest}); it is refused for "
                f"{left:.0f} s more"
            )

    def add(self, body: StartGenerate) -> str:
        """Remembers the request, and returns its digest."""
        digest = _digest(body)
        self._until[digest] = self._clock.now() + QUARANTINE_SECONDS
        self._until.move_to_end(digest)
        if len(self._until) > MOST_QUARANTINED:
            self._until.popitem(last=False)
        return digest


class Deaths:
    """Counts the engines that have died while they had one request."""

    def __init__(self, body: StartGenerate, progress: RequestProgress, quarantine: Quarantine) -> None:
        self.verdict: RequestQuarantined | None = None
        """The error that says why the request is tried no more; None while it is tried."""
        self._body = body
        self._progress = progress
        self._quarantine = quarantine
        self._all = 0
        self._stuck = 0  # since it had its last token
        self._weight = 0  # of these
        self._tokens = 0  # that it had when the last of these died

    def counted(self, error: Unavailable, *, waits: bool) -> KvloomError:
        """Counts the error if an engine has died. Returns it, or RequestQuarantined if that was one death too
        many. waits: whether the engine had not told that it had begun with the request."""
        if not isinstance(error, EngineDied):
            return error
        tokens = self._progress.tokens
        if tokens > self._tokens:
            self._stuck, self._weight, self._tokens = 0, 0, tokens
        self._all += 1
        self._stuck += 1
        self._weight += WAITED if waits else COMPUTED
        most = COMPUTED * (DEATHS_AFTER if tokens else DEATHS_BEFORE)
        if self.verdict is None and (self._weight >= most or self._all >= DEATHS_IN_ALL):
            self.verdict = self._quarantined(error)
        return self.verdict or error

    def _quarantined(self, error: EngineDied) -> RequestQuarantined:
        digest = self._quarantine.add(self._body)
        at = f"after {self._tokens} tokens" if self._tokens else "before its first token"
        deaths = f"{self._stuck} engines died {at}, and {self._all} in all"
        _log.error(
            "request %s for %s is quarantined (%s): %s; at last %s",
            self._body.request,
            self._body.model,
            digest,
            deaths,
            error.message,
        )
        why = short(f"{deaths} ({digest})")
        self._quarantine.record(Quarantined(request=self._body.request, model=self._body.model, reason=why))
        return RequestQuarantined(f"the request is quarantined ({digest}): {deaths}")


def _digest(body: StartGenerate) -> str:
    """Returns the digest of what a client sends again if it tries again: for whom, which model, which prompt,
    and how it is sampled, but for the seed, which is drawn anew for a client that gives none."""
    asked = (body.tenant, body.model, body.prompt, body.n, replace(body.sampling, seed=0))
    return hashlib.sha256(_encode(asked)).hexdigest()[:_SHOWN]
