"""Prompts are rendered and encoded in a small pool of processes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from kvloom.api.access.turns import Turns
from kvloom.api.texts.prompts import SHORT, Encoded, PlainPrompt, Prompt, TextModel
from kvloom.api.tokenizer import TokenizerForm
from kvloom.serve.processes.sandbox import Limits, OverLimit, Refused, Sandbox
from kvloom.types.errors import BadRequest, ConfigError, KvloomError, Unavailable
from kvloom.types.request import ModelCard

SIZE: Final = 2  # processes for short prompts, and as many for long ones and groups
SHORT_LIMITS: Final = Limits(2.0, 1 << 30)
LONG_LIMITS: Final = Limits(8.0, 1 << 30)
WAITING: Final = 1024  # of a tenant's prompts, for the turn of one model
REST_SECONDS: Final = 30.0
"""A tenant one of whose short prompts went over the limits at a model gets no other one there for so long: it
is the template or the tokenizer that takes too much, and not the prompt. Others' texts may be harmless."""


class TextProcesses:
    """The `Texts` of a gateway, an async context manager.

    A short text for a plain tokenizer, whose time grows with the text alone, is encoded at once, where it
    stands. All else runs in processes, and so do all templates. A model has one turn for its short prompts
    and one for its long ones, which its tenants have one after the other. So a model waits for a process
    until one piece of work of each other model has ended, at most. Who hangs up loses its place; what is
    under way goes on to its end or its limit.
    """

    def __init__(self, short: Limits = SHORT_LIMITS, long: Limits = LONG_LIMITS) -> None:
        """Both bound one call; what a model needs once may take eight times as much."""
        self._pools = {False: Sandbox("texts", SIZE, short), True: Sandbox("texts", SIZE, long)}
        self._turns: defaultdict[tuple[str, bool], Turns] = defaultdict(lambda: Turns(1, WAITING))
        self._resting: dict[tuple[str, str, str], tuple[float, str]] = {}
        self._work: set[asyncio.Task[bytes | KvloomError]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        work = [*self._work]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for pool in self._pools.values():
            await pool.__aexit__(kind, error, trace)

    async def admit(self, key: str, card: ModelCard) -> None:
        if TokenizerForm.of(card.tokenizer).plain():
            return
        try:
            await self._run(key, card, b"", "its tokenizer", "")
        except BadRequest as error:
            raise ConfigError(error.message) from None

    async def encode(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], tenant: str
    ) -> list[list[int]]:
        plain = all(isinstance(prompt, PlainPrompt) for prompt in prompts)
        if plain and model.tokenizer.plain and sum(prompt.size for prompt in prompts) <= SHORT:
            await asyncio.sleep(0)  # Many short texts must not hold up the loop together.
            return [model.encode(prompt) for prompt in prompts]
        what = "its tokenizer" if plain else "its chat template or its tokenizer"
        try:
            return await self._encoded(key, model, prompts, what, tenant)
        except BadRequest:
            if len(prompts) == 1:
                raise
        # Each alone, so that the right one is blamed, and has the limits for itself.
        return [(await self._encoded(key, model, [prompt], what, tenant))[0] for prompt in prompts]

    async def _encoded(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], what: str, tenant: str
    ) -> list[list[int]]:
        """Returns each prompt's tokens, made in a process. Raises as `encode` does."""
        param = prompts[0].param
        try:
            data = msgspec.msgpack.encode(prompts)
            long = len(prompts) > 1 or len(data) > 2 * SHORT
            answer = await self._run(key, model.card, data, what, tenant, long=long)
        except UnicodeEncodeError:
            said = "the text has half of a surrogate pair, which no tokenizer reads"
            raise BadRequest(said, param=param) from None
        except BadRequest as error:
            raise BadRequest(f"model {model.card.name}: {error.message}", param=param) from None
        return msgspec.msgpack.decode(answer, type=Encoded).tokens()

    async def _run(
        self, key: str, card: ModelCard, data: bytes, what: str, tenant: str, *, long: bool = False
    ) -> bytes:
        """Returns a process's answer. long: whether it is a long prompt, or several. Raises BadRequest,
        QueueFull and Unavailable."""
        turn = self._turns[key, long]
        await turn.take(tenant)
        # What is under way cannot be cancelled without its process, so the turn ends with the work, and not
        # with who waits for it.
        work = asyncio.create_task(self._called(key, card, data, what, tenant, long=long))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        work.add_done_callback(lambda _: turn.give())
        answer = await asyncio.shield(work)
        if isinstance(answer, KvloomError):
            raise answer
        return answer

    async def _called(
        self, key: str, card: ModelCard, data: bytes, what: str, tenant: str, *, long: bool
    ) -> bytes | KvloomError:
        now = asyncio.get_running_loop().time()
        self._resting = {who: rest for who, rest in self._resting.items() if rest[0] > now}
        if (rest := self._resting.get((key, what, tenant))) is not None:
            return BadRequest(rest[1])
        try:
            return await self._pools[long].call(key, lambda: msgspec.msgpack.encode(card), data)
        except OverLimit as error:
            why = f"{what} cannot be used here: {error}"
            if not long:
                until = asyncio.get_running_loop().time() + REST_SECONDS
                self._resting[key, what, tenant] = until, why
            return BadRequest(why)
        except Refused as error:
            return BadRequest(str(error))
        except Unavailable as error:
            return error
        except OSError as error:
            return Unavailable(f"no process can be started for {what}: {error}", retry_after=1)
