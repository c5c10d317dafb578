"""Prompts are rendered and encoded in a small pool of processes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import TracebackType
from typing import Final, Self

import msgspec

from kvloom.api.texts.prompts import SHORT, Encoded, PlainPrompt, Prompt, TextModel
from kvloom.api.tokenizer import TokenizerForm
from kvloom.serve.processes.sandbox import Limits, OverLimit, Refused, Sandbox
from kvloom.types.errors import BadRequest, ConfigError, KvloomError, Unavailable
from kvloom.types.request import ModelCard

SIZE: Final = 2  # processes for short prompts, and as many for long ones
SHORT_LIMITS: Final = Limits(2.0, 1 << 30)
LONG_LIMITS: Final = Limits(8.0, 1 << 30)
REST_SECONDS: Final = 30.0
"""A model one of whose short prompts went over the limits twice gets no other for so long: it is the template
or the tokenizer that takes too much, and not the prompt."""


class TextProcesses:
    """The `Texts` of a gateway, an async context manager.

    A short text for a plain tokenizer, whose time grows with the text alone, is encoded at once, where it
    stands. All else runs in processes, and so do all templates. A model has one turn for its short prompts
    and one for its long ones, so that it never holds up another. Who hangs up loses its place; what is under
    way goes on to its end or its limit.
    """

    def __init__(self, short: Limits = SHORT_LIMITS, long: Limits = LONG_LIMITS) -> None:
        """Both bound one call; what a model needs once may take four times the seconds."""
        self._pools = {False: Sandbox("texts", SIZE, short), True: Sandbox("texts", SIZE, long)}
        self._turns: defaultdict[tuple[str, bool], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(1)
        )
        self._resting: dict[tuple[str, str], tuple[float, str]] = {}
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
            await self._run(key, card, b"", "its tokenizer")
        except BadRequest as error:
            raise ConfigError(error.message) from None

    async def encode(self, key: str, model: TextModel, prompt: Prompt) -> list[int]:
        if isinstance(prompt, PlainPrompt) and model.tokenizer.plain and len(prompt.text) <= SHORT:
            await asyncio.sleep(0)  # Many short texts must not hold up the loop together.
            return model.encode(prompt)
        what = "its tokenizer" if isinstance(prompt, PlainPrompt) else "its chat template or its tokenizer"
        try:
            data = msgspec.msgpack.encode(prompt)
            answer = await self._run(key, model.card, data, what)
        except UnicodeEncodeError:
            said = "the text has half of a surrogate pair, which no tokenizer reads"
            raise BadRequest(said, param=prompt.param) from None
        except BadRequest as error:
            raise BadRequest(f"model {model.card.name}: {error.message}", param=prompt.param) from None
        return msgspec.msgpack.decode(answer, type=Encoded).tokens()

    async def _run(self, key: str, card: ModelCard, data: bytes, what: str) -> bytes:
        """Returns a process's answer. Raises BadRequest."""
        long = len(data) > 2 * SHORT
        turn = self._turns[key, long]
        await turn.acquire()
        # What is under way cannot be cancelled without its process, so the turn ends with the work, and not
        # with who waits for it.
        work = asyncio.create_task(self._called(key, card, data, what, long=long))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        work.add_done_callback(lambda _: turn.release())
        answer = await asyncio.shield(work)
        if isinstance(answer, KvloomError):
            raise answer
        return answer

    async def _called(
        self, key: str, card: ModelCard, data: bytes, what: str, *, long: bool
    ) -> bytes | KvloomError:
        now = asyncio.get_running_loop().time
        until, why = self._resting.get((key, what), (0.0, ""))
        if now() < until:
            return BadRequest(why)
        self._resting.pop((key, what), None)
        # Whoever ended a process, it may have had nothing to do with the text.
        for attempts_left in (0,) if long else (1, 0):
            try:
                return await self._pools[long].call(key, lambda: msgspec.msgpack.encode(card), data)
            except OverLimit as error:
                why = f"{what} cannot be used here: {error}"
                if not long and not attempts_left:
                    self._resting[key, what] = now() + REST_SECONDS, why
            except Refused as error:
                return BadRequest(str(error))
            except OSError as error:
                return Unavailable(f"no process can be started for {what}: {error}", retry_after=1)
        return BadRequest(why)
