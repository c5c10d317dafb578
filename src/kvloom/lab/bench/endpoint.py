"""An OpenAI endpoint: how it is asked, and how its streams are read."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import msgspec

from kvloom.lab.workload.request import Prompts, RequestResult, WorkloadRequest
from kvloom.types.clock import Clock
from kvloom.types.errors import ConfigError

_DATA, _DONE = b"data:", b"[DONE]"
LONGEST_ERROR: Final = 200


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """The parts of a completion's chunk, or of an error's body, that are of interest. Servers differ in how
    they say errors."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: Any = None
    message: str | None = None

    @property
    def problem(self) -> str:
        """The error in one line; empty if there is none."""
        found = self.error.get("message", self.error) if isinstance(self.error, dict) else self.error
        return " ".join(str(found or self.message or "").split())[:LONGEST_ERROR]


read_chunk = msgspec.json.Decoder(Chunk).decode


class Events:
    """A reader of events. `count` is the number of events so far, `last` the latest one's data, [DONE] aside,
    and `done` tells whether that has come."""

    def __init__(self) -> None:
        self.count = 0
        self.last = b""
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                content = line[len(_DATA) :].strip()
                if content == _DONE:
                    self.done = True
                else:
                    self.count += 1
                    self.last = content


CONNECT_SECONDS: Final = 30.0

Form = Literal["tokens", "text"]


class ServerError(Exception):
    """The server said no, or nothing. The message is one line."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Asking:
    """The way in which requests are written. `models` are the endpoint's names for a workload's models.
    `form` says whether prompts are token ids, or text of about as many tokens. `exact` asks for answers that
    do not end early, as kvloom and vLLM can give them."""

    prompts: Prompts
    models: Mapping[str, str]
    form: Form
    exact: bool

    def body(self, number: int, request: WorkloadRequest) -> bytes:
        prompt = (
            self.prompts(number, request) if self.form == "tokens" else self.prompts.text(number, request)
        )
        body: dict[str, object] = {
            "model": self.models.get(request.model, request.model),
            "prompt": prompt,
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact:
            body["ignore_eos"] = True
        if request.priority:
            body["priority"] = request.priority
        return msgspec.json.encode(body)


class Endpoint:
    """`url` is `http://HOST:PORT`, with or without `/v1`, and `timeout` the seconds of a request. The
    endpoint has to be entered and left. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str, key: str | None, timeout: float, asking: Asking, clock: Clock) -> None:
        self.url = _base(url)
        self._asking = asking
        self._clock = clock
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))

    async def __aenter__(self) -> Endpoint:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def served(self) -> list[str] | None:
        """Returns the models' names; None if the server does not tell. Raises ServerError if it cannot be
        reached, or wants another key."""
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            remedy = "`kvloom serve` starts one, and --url names another"
            raise ServerError(f"{self.url}: {_said(error)}; {remedy}") from error
        if response.status in (401, 403):
            raise ServerError(f"{self.url}: {_refusal(response.status, data)}; --key is its API key")
        try:
            return [model.id for model in msgspec.json.decode(data, type=_Models).data]
        except ValueError:
            return None

    def body(self, number: int, request: WorkloadRequest) -> bytes:
        """Returns the body for the workload's request `number`."""
        return self._asking.body(number, request)

    async def ask(self, request: WorkloadRequest, body: bytes, due: float) -> RequestResult:
        """Sends the request and returns its result, in seconds from `due` on the clock."""
        try:
            async with self._session.post(f"{self.url}/v1/completions", data=body) as response:
                if response.status != 200:
                    problem = _refusal(response.status, await response.read())
                    return RequestResult(request=request, first=None, end=None, tokens=0, error=problem)
                return await self._stream(response, request, due)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError
            return RequestResult(request=request, first=None, end=None, tokens=0, error=_said(error))

    async def _stream(
        self, response: aiohttp.ClientResponse, request: WorkloadRequest, due: float
    ) -> RequestResult:
        events, first, end = Events(), None, None
        async for data in response.content.iter_any():
            before = events.count
            events.feed(data)
            if events.count > before:
                end = self._clock.now() - due
                first = end if first is None else first
        try:
            chunk = read_chunk(events.last or b"{}")
        except ValueError as error:
            return RequestResult(
                request=request, first=first, end=end, tokens=0, error=f"an unreadable event: {error}"
            )
        usage = chunk.usage
        tokens = usage.completion_tokens if usage else events.count
        cached = usage.prompt_tokens_details if usage else None
        return RequestResult(
            request=request,
            first=first,
            end=end,
            tokens=tokens,
            cached=(cached.cached_tokens or 0) if cached else 0,
            error=chunk.problem or self._missing(events, tokens, request),
        )

    def _missing(self, events: Events, tokens: int, request: WorkloadRequest) -> str:
        if not events.done:
            return "the stream ended before its [DONE]"
        if self._asking.exact and tokens < request.output:
            return "fewer tokens than were asked for"
        return ""


def _base(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/").removesuffix("/v1")
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"--url {url}: http://HOST:PORT is right")


def _refusal(status: int, body: bytes) -> str:
    try:
        said = read_chunk(body).problem
    except ValueError:
        said = ""
    return f"status {status}: {said}" if said else f"status {status}"


def _said(error: Exception) -> str:
    """Returns the error in one line. aiohttp's own errors name the address too."""
    if isinstance(error, TimeoutError):
        return "took too long"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return f"cannot be reached: {os.strerror(number) if number > 0 else error.os_error}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
