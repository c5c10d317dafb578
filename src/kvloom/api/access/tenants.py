"""Keys with names as they call: how much each has used of its limits, and what one request of it may use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.api.errors import NeverFits, RateLimited, error_response
from kvloom.api.metrics import KeyCounts
from kvloom.config.keys import NamedKey
from kvloom.types.numbers import show_count

WINDOW: Final = 60.0  # seconds in which a bucket empties
_NOTHING: Final = 1e-6  # what sums of floats may be off
_ACCESS: Final = "kvloom.access"


@dataclass(slots=True)
class Bucket:
    """Counts what was used of a limit by the minute: a leaky bucket as a meter (ITU-T I.371, the generic cell
    rate algorithm).

    It takes a whole minute's worth at once, and empties evenly. What was used beyond the limit is a debt,
    after which nothing more is taken until the bucket has room again.
    """

    used: float = 0.0
    _at: float = 0.0

    def level(self, limit: int, now: float) -> float:
        """Returns what counts as used now."""
        self.used = max(0.0, self.used - (now - self._at) * limit / WINDOW)
        self._at = now
        return self.used

    def wait(self, limit: int, more: int, now: float) -> float:
        """Returns the seconds until `more` finds room; what is more than the limit needs an empty bucket."""
        over = self.level(limit, now) + min(more, limit) - limit
        return over * WINDOW / limit if over > _NOTHING else 0.0


class Tenant:
    """A key with a name, and what runs and was used under it. Its key may change while requests run."""

    def __init__(self, key: NamedKey, clock: Callable[[], float]) -> None:
        """clock: tells seconds."""
        self.key = key
        self.counts = KeyCounts()
        self._clock = clock
        self._running = 0
        self._requests = Bucket()
        self._tokens = Bucket()

    def begin(self) -> Grant:
        """Lets a request begin, which the caller has to end. Raises RateLimited."""
        key, now = self.key, self._clock()
        if key.concurrency is not None and self._running >= key.concurrency:
            running, most = self._running, key.concurrency
            said = (
                f"{key.name} has {show_count(running, 'request')} under way; "
                f"{most} at once {'is' if most == 1 else 'are'} right"
            )
            raise self._refusal("concurrency", said, 1.0)
        if key.requests_per_minute is not None:
            wait = self._requests.wait(key.requests_per_minute, 1, now)
            self._check("requests", key.requests_per_minute, wait)
        if key.tokens_per_minute is not None:
            # before anything is done for the request, whose tokens nobody has counted yet
            self._check("tokens", key.tokens_per_minute, self._tokens.wait(key.tokens_per_minute, 1, now))
        self._requests.used += 1
        self._running += 1
        self.counts.requests += 1
        return Grant(self)

    def reserve(self, tokens: int) -> None:
        """Takes tokens off the limit. Raises RateLimited, and NeverFits for more than the whole limit."""
        most = self.key.tokens_per_minute
        if most is not None:
            if tokens > most:
                said = f"the request asks for {tokens} tokens, and {self.key.name} may use {most} a minute"
                self.counts.refuse("tokens")
                raise NeverFits(f"{said}: a shorter prompt, or a smaller `max_tokens`, is right")
            self._check("tokens", most, self._tokens.wait(most, tokens, self._clock()))
        self._tokens.used += tokens

    def take(self, tokens: int) -> None:
        """Counts tokens that were made beyond those reserved; or gives some back, if there are fewer."""
        if self.key.tokens_per_minute is not None:
            self._tokens.level(self.key.tokens_per_minute, self._clock())
        self._tokens.used = max(0.0, self._tokens.used + tokens)

    def end(self) -> None:
        self._running -= 1

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers on limits, for those that the key has."""
        now, key, told = self._clock(), self.key, []
        for what, limit, bucket in (
            ("requests", key.requests_per_minute, self._requests),
            ("tokens", key.tokens_per_minute, self._tokens),
        ):
            if limit is not None:
                level = bucket.level(limit, now)
                told += [
                    (f"x-ratelimit-limit-{what}", str(limit)),
                    (f"x-ratelimit-remaining-{what}", str(max(0, math.floor(limit - level)))),
                    (f"x-ratelimit-reset-{what}", show_span(level * WINDOW / limit)),
                ]
        return [(name.encode(), value.encode()) for name, value in told]

    def _check(self, what: str, limit: int, wait: float) -> None:
        if wait > 0:
            said = f"{self.key.name} may use {limit} {what} a minute; room comes in {show_span(wait)}"
            raise self._refusal(what, said, wait)

    def _refusal(self, what: str, said: str, wait: float) -> RateLimited:
        self.counts.refuse(what)
        return RateLimited(said, retry_after=max(1, math.ceil(wait)))


class Grant:
    """Counts what one request uses of its key's limits, from its beginning to its end.

    When the prompt is known, its tokens and those that the request names as its most are reserved. What is
    made beyond that, if it names none, is counted as it is made. What was reserved for the output and not
    made is given back at the end; a prompt is paid for whatever becomes of it.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._reserved = 0
        self._made = 0
        self._over = False

    def reserve(self, prompt: int, output: int) -> None:
        """prompt, output: tokens. Raises RateLimited."""
        self._tenant.reserve(prompt + output)
        self._reserved = output
        self._tenant.counts.prompt_tokens += prompt

    def made(self, tokens: int) -> None:
        """Counts tokens of the output."""
        beyond = max(0, self._made + tokens - max(self._reserved, self._made))
        self._made += tokens
        self._tenant.counts.output_tokens += tokens
        if beyond:
            self._tenant.take(beyond)

    def settle(self) -> None:
        """Gives back what was reserved and not made."""
        self._tenant.take(min(0, self._made - self._reserved))
        self._reserved = min(self._made, self._reserved)

    def end(self) -> None:
        """Ends the request; a second time changes nothing."""
        if not self._over:
            self._over = True
            self.settle()
            self._tenant.end()


@dataclass(frozen=True, slots=True)
class Access:
    """Says who makes a request, and what it may do."""

    tenant: str = ""
    """The tenant for whom it is made: a key's name, a sign for a key without one, or an address."""
    known: bool = False
    """Whether it has shown a key that there is."""
    salt: str = ""
    """The salt of its prefixes: it shares them only with requests of the same salt."""
    shows_cached: bool = True
    """Whether it is told how many tokens of its prompt were cached."""
    priority: int | None = None
    """The most urgent priority that it may have; None for any."""
    admin: str | None = None
    """The name by which the audit trail calls the caller, if that is an administrator."""
    holder: Tenant | None = None
    """The holder of its key, if that has a name."""
    grant: Grant | None = None
    """The limits on what it may use, if its key has a name and it asks for a completion."""

    def may_use(self, model: str) -> bool:
        return self.holder is None or self.holder.key.models is None or model in self.holder.key.models


NOBODY: Final = Access()


def access_of(scope: Scope) -> Access:
    """Returns what `set_access` has noted of a request."""
    access: Access = scope.get("state", {}).get(_ACCESS, NOBODY)
    return access


def set_access(scope: Scope, access: Access) -> None:
    """Notes who makes the request, for `access_of`."""
    scope.setdefault("state", {})[_ACCESS] = access


class MeterRequests:
    """An ASGI middleware that holds each key with a name to its limits on requests, and tells it of all of
    them in the head of each answer to a completion."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        """paths: those whose requests count."""
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = access_of(scope)
        key = access.holder
        if key is None or scope.get("method") != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return

        grant: Grant | None = None

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *key.headers()]
            elif grant is not None and not message.get("more_body"):
                grant.end()  # before the caller has the whole answer, and may ask anew
            await send(message)

        try:
            grant = key.begin()
        except RateLimited as error:
            await error_response(scope, error)(scope, receive, tell)
            return
        try:
            set_access(scope, replace(access, grant=grant))
            await self._app(scope, receive, tell)
        finally:
            grant.end()


def show_span(seconds: float) -> str:
    """Returns a time as OpenAI's headers tell it: `20ms`, `1s`, `6m0s`. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
