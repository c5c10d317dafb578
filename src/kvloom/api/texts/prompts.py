"""Prompts: from a text, or from messages, to the tokens of one model, within bounds."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from kvloom.api.texts.template import ChatTemplate
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.errors import BadRequest, ConfigError, KvloomError, PromptTooLong, WireError
from kvloom.types.request import ModelCard

SHORT: Final = 8_192
"""Characters of a text that is encoded on the loop, at about a microsecond each; also the bytes of a group
of prompts."""
GROUP: Final = 64  # prompts that are encoded together
UNRENDERED: Final = 4
"""The messages of a chat may have so many times the bytes that fit a context: templates leave out parts of
past messages, such as what was thought."""
_SHORTER: Final = "Please reduce its length."
PROBES: Final = tuple(run * (SHORT // len(run)) + "!" for run in ("a", " ", "\n", "1", "中", "ab 1.é\u0301"))
"""Texts that a tokenizer must be able to encode within the limits before it is served."""


class PlainPrompt(msgspec.Struct, frozen=True, tag="plain"):
    """A text as it is. special: whether it gets the tokens that the model wants around plain text; bounded:
    whether it is to fit the model's context; second: the text with which it is a pair, if it is one; param:
    the parameter of a request that errors name."""

    text: str
    special: bool = True
    bounded: bool = True
    second: str = ""
    param: str = "prompt"

    @property
    def most_times(self) -> int:
        """Returns how many times its bytes may be those that fit a context."""
        return 1

    @property
    def size(self) -> int:
        """Returns its bytes in UTF-8."""
        return utf8_size(self.text) + utf8_size(self.second)


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """Holds what a chat template is given. `given` is a JSON text of messages, tools and options, whose
    numbers may be larger than those of other forms; `content` counts the bytes of the messages' contents in
    UTF-8; `bounded` is as of `PlainPrompt`."""

    given: str
    content: int
    bounded: bool = True

    @staticmethod
    def of(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        bounded: bool = True,
    ) -> ChatPrompt:
        try:
            given = json.dumps((messages, tools, options))
        except RecursionError:
            raise BadRequest("messages: a call's arguments are nested too deeply", param="messages") from None
        return ChatPrompt(given, content_bytes(messages), bounded)

    @property
    def param(self) -> str:
        return "messages"

    @property
    def most_times(self) -> int:
        return UNRENDERED

    @property
    def size(self) -> int:
        return self.content


Prompt = PlainPrompt | ChatPrompt


def utf8_size(text: str) -> int:
    """Returns a text's bytes in UTF-8. For long texts it is the number of characters, a lower bound: counting
    bytes would copy the text."""
    return len(text) if text.isascii() or len(text) > SHORT else len(text.encode("utf-8", "replace"))


def content_bytes(messages: list[dict[str, Any]]) -> int:
    """Returns the bytes of the messages' contents in UTF-8, as `utf8_size` counts them."""
    return sum(utf8_size(message["content"]) for message in messages)


def context_message(card: ModelCard) -> str:
    """Returns how long the model's context is, in OpenAI's words, by which clients know such an error."""
    return f"This model's maximum context length is {card.context_length} tokens"


def too_long(card: ModelCard, param: str, tokens: int) -> PromptTooLong:
    """Returns the error of a text that has more tokens than the context. param: the parameter that has it."""
    return PromptTooLong(
        f"{context_message(card)}. However, {param} has {tokens} tokens. {_SHORTER}", param=param
    )


@dataclass(frozen=True, slots=True)
class TextModel:
    """The parts of a model that make tokens of prompts, wherever they run."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate

    @staticmethod
    def of(card: ModelCard, tokenizer: Tokenizer | None = None) -> TextModel:
        """tokenizer: the card's, if it has been read already. Raises ConfigError."""
        return TextModel(card, tokenizer or Tokenizer(card.tokenizer), ChatTemplate(card))

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the prompt's tokens, at most as many as the context has if it is bounded. Raises BadRequest
        and PromptTooLong."""
        special, second = False, ""  # a chat template has added them
        if isinstance(prompt, PlainPrompt):
            text, special, second = prompt.text, prompt.special, prompt.second
        else:
            text = self.template.render(*json.loads(prompt.given))
            if prompt.bounded:
                self.check_size(utf8_size(text), 1, prompt.param)
        try:
            ids = self.tokenizer.encode(text, special=special, second=second)
        except BadRequest as error:
            raise BadRequest(f"model {self.card.name}: {error.message}", param=prompt.param) from None
        if isinstance(prompt, PlainPrompt) and not (prompt.bounded or special):
            return ids
        ids = self._with_bos(ids, special=special)
        if prompt.bounded and len(ids) > self.card.context_length:
            raise too_long(self.card, prompt.param, len(ids))
        return ids

    def check_size(self, size: int, times: int, param: str) -> None:
        """Raises PromptTooLong if so many bytes cannot fit the context, whatever they are."""
        longest = self.tokenizer.most_bytes
        if longest is not None and size > (most := times * longest * self.card.context_length):
            raise PromptTooLong(
                f"{context_message(self.card)} of at most {longest} bytes each. However, {param} has {size} "
                f"bytes or more, and at most {most} are read. {_SHORTER}",
                param=param,
            )

    def _with_bos(self, ids: list[int], *, special: bool) -> list[int]:
        """Returns the tokens behind the one with which the model's texts begin. `special` adds what the model
        wants around plain text, which a chat template has added already."""
        bos = self.card.bos_token_id
        if bos is None and not ids:
            raise BadRequest(
                f"the prompt is empty and model {self.card.name} has no token to begin with", param="prompt"
            )
        missing = special and self.card.add_bos and ids[:1] != [bos]
        return [bos, *ids] if bos is not None and (missing or not ids) else ids


class Texts(Protocol):
    """Renders and encodes texts and templates of strangers (clients, and makers of checkpoints) in processes
    in which they do no harm."""

    async def admit(self, key: str, card: ModelCard) -> None:
        """Raises ConfigError if the model's tokenizer cannot be used within the limits. The key names the
        card, and no other."""

    async def encode(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], tenant: str
    ) -> list[list[int]]:
        """Returns the tokens of each prompt of a group. tenant: who asks. Raises BadRequest, also if making
        them takes too much, QueueFull if too many of the tenant's groups wait, and Unavailable."""


def grouped(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Yields the prompts in their order: in each group at most `GROUP`, together as large as one short text,
    or one that is longer."""
    group: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if group and (size + prompt.size > SHORT or len(group) == GROUP):
            yield group
            group, size = [], 0
        group.append(prompt)
        size += prompt.size
    if group:
        yield group


class InlineTexts:
    """Renders and encodes in this process, without limits: for tests, and for engines of one's own."""

    async def admit(self, key: str, card: ModelCard) -> None:
        """Admits any model."""

    async def encode(
        self, key: str, model: TextModel, prompts: Sequence[Prompt], tenant: str
    ) -> list[list[int]]:
        if sum(prompt.size for prompt in prompts) <= SHORT:
            await asyncio.sleep(0)  # Many short texts must not hold up the loop together.
            return [model.encode(prompt) for prompt in prompts]
        return await asyncio.to_thread(lambda: [model.encode(prompt) for prompt in prompts])


class Encoded(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries what a process answers: each prompt's tokens as numbers of four bytes each, or an error."""

    ids: list[bytes] = []
    error: WireError | None = None

    @staticmethod
    def of(prompts: Iterable[list[int]]) -> Encoded:
        return Encoded([array("I", ids).tobytes() for ids in prompts])

    def tokens(self) -> list[list[int]]:
        """Returns the tokens of each prompt. Raises the error."""
        if self.error is not None:
            raise KvloomError.from_wire(self.error)
        return [memoryview(ids).cast("I").tolist() for ids in self.ids]


_prompts: Final = msgspec.msgpack.Decoder(list[Prompt]).decode
_answer: Final = msgspec.msgpack.Encoder().encode


class TextWorker:
    """Renders and encodes in a sandbox's process. Keys name cards."""

    def __init__(self) -> None:
        self._models: dict[str, TextModel] = {}

    def prepare(self, key: str, data: bytes) -> None:
        """Takes a model's card. Models with equal tokenizers share one. Raises ConfigError."""
        card = msgspec.msgpack.decode(data, type=ModelCard)
        equal = (one.tokenizer for one in self._models.values() if one.card.tokenizer == card.tokenizer)
        self._models[key] = TextModel.of(card, next(equal, None))

    def run(self, key: str, data: bytes) -> bytes:
        """Returns an `Encoded` of prompts; without any, tries the tokenizer. Raises ConfigError."""
        if not data:
            self._attempt(self._models[key].tokenizer)
            return b""
        try:
            return _answer(Encoded.of(map(self._models[key].encode, _prompts(data))))
        except KvloomError as error:
            return _answer(Encoded(error=error.to_wire()))

    def _attempt(self, tokenizer: Tokenizer) -> None:
        for text in PROBES:
            try:
                tokenizer.encode(text, special=True)
            except BadRequest as error:
                raise ConfigError(error.message) from None
