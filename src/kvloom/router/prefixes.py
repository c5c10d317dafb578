"""What a router does with the prefix caches of its units: it asks what they hold, for its index, and lets
them keep prefixes for longer than a request."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from kvloom.kv.prefix_index import PrefixIndex
from kvloom.types.client import EngineClient
from kvloom.types.clock import Clock
from kvloom.types.errors import KvloomError
from kvloom.types.request import StartGenerate
from kvloom.types.verbs import LONGEST_PIN, CachedSince, Pin

PERIOD: Final = 0.5  # seconds between an answer and the next time the unit is asked
LINGER: Final = 10.0  # seconds for which it is still asked when no program wants to know any more
ANSWER_SECONDS: Final = 5.0  # after which an answer is not waited for any more

_NEVER: Final = CachedSince(life="", version=0)


def lasting_pin(body: StartGenerate, end: int, seconds: int) -> Pin:
    """Returns the pin of the first `end` tokens of a request's prompt, for a time that has nothing to do with
    the request's. Its id follows from the model, the tenant, the salt and the tokens, so that another request
    that asks for the same renews it. Raises ValueError for a time that no pin lasts."""
    if not 1 <= seconds <= LONGEST_PIN:
        raise ValueError(f"keep: {seconds} s cannot be; 1 to {LONGEST_PIN} is right")
    prompt, whose = body.prompt[:end], repr((body.model, body.tenant, body.salt))
    content = blake2b(array("i", prompt).tobytes() + whose.encode(), digest_size=16).hexdigest()
    return Pin(
        model=body.model,
        request=f"kept~{content}",
        prompt=prompt,
        lease=seconds,
        salt=body.salt,
        tenant=body.tenant,
    )


class PrefixWatch:
    """Tells the index what one unit holds, for as long as programs ask the index where prefixes are."""

    def __init__(
        self, unit: str, client: EngineClient, index: PrefixIndex, clock: Clock, up: Callable[[], bool]
    ) -> None:
        """up: whether the unit can be asked."""
        self._unit = unit
        self._client = client
        self._index = index
        self._clock = clock
        self._up = up
        self._told = _NEVER
        self._lives = 0  # how often the unit was forgotten
        self._wanted = asyncio.Event()
        self._until = 0.0

    def want(self) -> None:
        """Lets the unit be asked from now on."""
        self._until = self._clock.now() + LINGER
        self._wanted.set()

    def forget(self) -> None:
        """Forgets what the unit holds, because it is gone or another one."""
        self._told = _NEVER
        self._lives += 1
        self._index.forget(self._unit)

    async def watch(self) -> None:
        while True:
            await self._wanted.wait()
            while self._clock.now() < self._until:
                if self._up():
                    await self._ask()
                await self._clock.sleep(PERIOD)
            self._wanted.clear()

    async def _ask(self) -> None:
        """Asks once. A unit that does not answer is found out by whoever sends it requests."""
        life = self._lives
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._client.contents(self._told)
        except (KvloomError, TimeoutError):
            return
        if life == self._lives:  # else it is of a unit that was lost meanwhile
            self._index.apply(self._unit, answer)
            self._told = CachedSince(life=answer.life, version=answer.version)
