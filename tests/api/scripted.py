"""An engine that says what it was told to, a tokenizer to say it with, and a gateway on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import uvicorn
from hypothesis import HealthCheck, settings
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvloom.types.errors import KvloomError
from kvloom.types.load import UnitLoad
from kvloom.types.request import (
    EndEvent,
    Event,
    ModelCard,
    PromptEvent,
    StartGenerate,
    TokenEvent,
    TokenLogprob,
)
from kvloom.types.service import Service
from tests.cluster import loads
from tests.processes import DEADLINE

# On a busy machine any example may take long.
UNTIMED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

EOS = "</s>"
SPECIAL = ["<s>", EOS, "<|user|>", "<|assistant|>", "[TOOL_CALLS]"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE of about 330 tokens with a few merges and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[AddedToken(one, special=True) for one in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, the quick brown fox stops here"] * 9, trainer)
    return tokenizer


def token(text: str) -> int:
    found: int | None = byte_level().token_to_id(text)
    assert found is not None, text
    return found


def tokens(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return ids


def card(name: str = "tiny", template: str | None = TEMPLATE, **changes: object) -> ModelCard:
    fields: dict[str, object] = {
        "name": name,
        "path": f"/models/{name}",
        "context_length": 512,
        "vocab_size": 384,
        "tokenizer": byte_level().to_str(),
        "chat_template": template,
        "special_tokens": {"bos_token": "<s>", "eos_token": EOS},
        "eos_token_ids": (token(EOS),),
        "bos_token_id": token("<s>"),
        "add_bos": True,
        "architecture": "LlamaForCausalLM",
        "parameters": 1,
        "dtype": "float32",
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


Script = Callable[[StartGenerate, int], list[int]]


@dataclass
class ScriptedEngine:
    """Plays `script(body, choice)`: the tokens of each choice, ended by a stop token or by max_tokens.

    `error` is raised on the first step; `break_after` tokens the stream dies with `break_with`; `hold`
    makes it wait for ever after that many. `started`, `closed` and `bodies` tell what was seen.
    """

    script: Script
    cards: list[ModelCard] = field(default_factory=lambda: [card()])
    error: KvloomError | None = None
    break_after: int | None = None
    break_with: KvloomError | EndEvent | None = None
    hold: int | None = None
    away: bool = False
    bodies: list[StartGenerate] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)

    async def models(self) -> list[ModelCard]:
        return self.cards

    async def abort(self, request: str, choice: int | None = None) -> None:
        self.aborted.append((request, choice))

    async def loads(self) -> dict[str, UnitLoad]:
        if self.away:
            raise KvloomError("gone")
        counts = {"preemptions_total": 3, "displaced_total": 4, "unread_total": 5, "unread_blocks_total": 6}
        busy = loads.model(2, waiting=1, oldest_wait=7.0, used_blocks=40, **counts)
        return {"unit-0": loads.unit(busy, blocks=100, names=["tiny"])}

    @property
    def choices(self) -> dict[tuple[str, str], int]:
        return {}

    @property
    def services(self) -> dict[str, Service]:
        return {"unit-0": "down" if self.away else "up"}

    awaited = ()

    @property
    def waiting(self) -> dict[str, int]:
        return {"awaited": 2}

    async def start_generate(self, body: StartGenerate) -> AsyncGenerator[list[Event], None]:
        if self.error is not None:
            raise self.error
        self.bodies.append(body)
        frame: list[Event] = []
        try:
            if body.sampling.prompt_logprobs is not None:
                top = body.sampling.prompt_logprobs
                yield [PromptEvent([_logprob(one, top) for one in body.prompt[1:]])]
            for count, event in enumerate(self._events(body)):
                frame.append(event)
                if count + 1 == self.break_after:
                    yield frame
                    if isinstance(self.break_with, KvloomError):
                        raise self.break_with
                    if self.break_with is not None:
                        yield [self.break_with]
                    return
                if count + 1 == self.hold:
                    yield frame
                    self.held.set()
                    await asyncio.Event().wait()
                ended = isinstance(event, EndEvent)
                if ended or (len(frame) >= body.interval * body.n and not self._ends(body, event)):
                    yield frame
                    frame = []
        finally:
            self.closed.append(body.request)
            self.gone.set()

    def _ends(self, body: StartGenerate, event: Event) -> bool:
        """A stop token travels in the frame of its EndEvent."""
        return isinstance(event, TokenEvent) and event.token in body.sampling.stop_token_ids

    def _events(self, body: StartGenerate) -> Iterator[Event]:
        scripts = [self.script(body, choice) for choice in range(body.n)]
        over: set[int] = set()
        for index in range(body.sampling.max_tokens):
            for choice, script in enumerate(scripts):
                if choice in over:
                    continue
                made = script[index] if index < len(script) else token(EOS)
                top = body.sampling.logprobs
                yield TokenEvent(choice, index, made, None if top is None else _logprob(made, top))
                stopped = made in body.sampling.stop_token_ids and index >= body.sampling.min_tokens
                if stopped or index + 1 == body.sampling.max_tokens:
                    over.add(choice)
                    yield EndEvent(choice, "stop" if stopped else "length", made if stopped else None, 2)


def _logprob(made: int, top: int) -> TokenLogprob:
    return TokenLogprob(-0.5, tuple((made + at, -0.5 - at) for at in range(top)))


def says(*texts: str) -> Script:
    """Choice i says text i, the last for all beyond."""
    return lambda _, choice: tokens(texts[min(choice, len(texts) - 1)])


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """A real server on loopback in a thread; gives its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        listener.close()
