"""A server's OpenAI API as commands ask it, and the options that say which server, and how it answers."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cyclopts import Parameter, Token
from msgspec import Struct

from kvloom.cli.app import API_KEY_VARIABLE, DEFAULT_URL, ApiKey, CommandFailed, Url, Whole
from kvloom.cli.gateway import Connection, GatewayError, sendable
from kvloom.types.errors import ConfigError

SILENCE: Final = 600.0  # seconds that a token may take: a request may wait for others, and for its model
CUT_OFF: Final = "length"
_DONE: Final = b"[DONE]"


class Message(Struct, frozen=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ModelLine(Struct, frozen=True):
    """A model as a server lists it; servers that are not kvloom tell less."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None
    task: str = "generate"


class _ModelList(Struct, frozen=True):
    data: list[ModelLine]


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The thoughts under the name that servers that are not kvloom may use instead of `reasoning_content`."""


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Problem(Struct, frozen=True):
    message: str = "the answer has failed"


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    error: _Problem | None = None


class Piece(Struct, frozen=True):
    """A part of an answer, as it comes. `thought` is what the model thinks before its answer, and `finish` is
    the reason why the answer is over, if it is."""

    thought: str
    text: str
    finish: str | None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The server that a command asks, and the API key that it asks with."""

    url: Url = DEFAULT_URL
    key: ApiKey = None
    ca: Annotated[
        Path | None, Parameter(help="certificates of the server's authorities (the system's, $SSL_CERT_FILE)")
    ] = None

    def client(self, model: str | None = None) -> ApiClient:
        """Returns a client of the server. `model` is the model that a remedy names. Raises ConfigError if the
        address, the key or the certificates cannot be used."""
        key = self.key or os.environ.get(API_KEY_VARIABLE)
        if key:
            key = sendable(key, "--key" if self.key else API_KEY_VARIABLE)
        serve = f"kvloom serve {model}" if model and "/" in model else "kvloom serve"  # an id of the hub
        connection = Connection(
            self.url,
            key,
            ca=self.ca,
            wants=f"--key KEY or ${API_KEY_VARIABLE} gives one",
            remedy=f"`{serve}` starts one, and --url names another",
        )
        return ApiClient(connection)


def _read_temperature(_: type, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    try:
        if 0 <= (temperature := float(text)) <= 2:
            return temperature
    except ValueError:
        pass
    raise ConfigError(f"--temperature: {text[:40]!r}; a number from 0 to 2 is right")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options with which a model is to answer. An option that is left out is as the server and the
    model's own defaults have it."""

    system: Annotated[str | None, Parameter(metavar="TEXT", help="the system message")] = None
    temperature: Annotated[
        float | None,
        Parameter(converter=_read_temperature, help="0 takes the likeliest token (the model's own)"),
    ] = None
    max_tokens: Annotated[Whole | None, Parameter(help="of an answer (what the context has room for)")] = None
    seed: Annotated[Whole | None, Parameter(help="the same seed draws the same answer (none)")] = None
    thoughts: Annotated[
        bool | None,
        Parameter(
            negative="--no-thoughts",
            help="show what the model thinks before it answers; in a pipe, on standard error (in a terminal)",
        ),
    ] = None

    def parameters(self) -> dict[str, float | int]:
        """Returns the parameters of a request that are given. Raises ConfigError."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens: {self.max_tokens}; 1 or more is right")
        given = {"temperature": self.temperature, "max_completion_tokens": self.max_tokens, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}


THIS_SERVER: Final = ApiOptions()
BY_DEFAULT: Final = AnswerOptions()


class ApiClient:
    """A client of a server's OpenAI API."""

    def __init__(self, server: Connection) -> None:
        self._server = server
        self.url = server.url

    def models(self) -> list[ModelLine]:
        """Returns the models that the key opens, by name. Raises GatewayError."""
        return sorted(self._server.call("v1/models", _ModelList).data, key=lambda one: one.id)

    def chosen(self, name: str | None) -> str:
        """Returns the name of the model that is meant: the only one if none is named, else the one of that
        name, or the one that `kvloom serve` would call so. Raises GatewayError, and CommandFailed if it is
        not clear which."""
        listed = self.models()
        other = next((one.task for one in listed if one.id == name and one.task != "generate"), None)
        if other is not None:
            made, path = ("embeddings", "/v1/embeddings") if other == "embed" else ("scores", "/v1/score")
            raise CommandFailed(f"{self.url}: {name} makes {made}, and no text; POST {path} asks it")
        served = [one.id for one in listed if one.task == "generate"]
        if name is None:
            if len(served) == 1:
                return served[0]
            told = ", ".join(served) or "none; `kvloom model add` adds one"
            raise CommandFailed(f"{self.url}: MODEL has to be one of those that are served: {told}")
        if name in served:
            return name
        from kvloom.config.file import model_named  # noqa: PLC0415 -- a name that is served needs no config

        called = next(iter(model_named(Path(name))), None)
        if called in served:
            return called
        remedy = f"; `kvloom serve {name}` serves it" if called is not None else ""
        raise CommandFailed(
            f"{self.url}: serves no model {name[:140]!r}, but {', '.join(served) or 'none'}{remedy}"
        )

    def answer(
        self, model: str, messages: Sequence[Message], parameters: dict[str, float | int]
    ) -> Generator[Piece, None, None]:
        """Yields the answer to a conversation as it comes. The server ends it if the iterator is closed.
        Raises GatewayError."""
        body = {"model": model, "messages": messages, "stream": True, **parameters}
        with closing(self._server.stream("v1/chat/completions", body, silence=SILENCE)) as events:
            for event in events:
                if event.data == _DONE:
                    return
                for choice in self._chunk(event.data).choices[:1]:
                    delta = choice.delta
                    thought = delta.reasoning_content or delta.reasoning or ""
                    yield Piece(thought, delta.content or "", choice.finish_reason)
        raise GatewayError(f"{self.url}: the answer broke off before its end; ask again")

    def _chunk(self, data: bytes) -> _Chunk:
        """Returns a chunk of the answer. Raises GatewayError if it tells an error, or is no chunk."""
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise GatewayError(f"{self.url}: answers, but not as an OpenAI API does ({error})") from error
        if chunk.error is not None:
            raise GatewayError(f"{self.url}: {' '.join(chunk.error.message.split())}")
        return chunk
