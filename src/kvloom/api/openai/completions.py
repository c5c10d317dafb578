"""/v1/completions: from prompts to generations, and from pieces of text to choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.generation.answering import Answering, EndpointContext, Writer, encode
from kvloom.api.generation.pieces import Generation, Piece
from kvloom.api.generation.resume import Origin
from kvloom.api.generation.sampling import (
    LogprobsCollector,
    check_prompt,
    room_for,
    sampling_params,
    start_of,
)
from kvloom.api.metrics import Watch
from kvloom.api.schemas.generation import CompletionBody
from kvloom.api.texts.prompts import PlainPrompt
from kvloom.types.errors import BadRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_CHOICES = 2048


@dataclass(frozen=True, slots=True)
class CompletionEndpoint:
    gateway: EndpointContext

    async def __call__(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(parse, CompletionBody), self._prepare)

    async def _prepare(
        self, body: CompletionBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        if len(body.prompts) * body.choices > MAX_CHOICES:
            raise BadRequest(f"prompts times n is more than {MAX_CHOICES}", param="n")
        texts = [PlainPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        for text in texts:
            if isinstance(text, PlainPrompt):
                model.check_size(text.size, text.most_times, text.param)
        plain = [one for one in texts if isinstance(one, PlainPrompt)]
        encoded = iter([tokens async for tokens in model.tokens_of(plain, tenant)])
        prompts = [next(encoded) if isinstance(one, PlainPrompt) else one for one in texts]
        request_id = origin.request_id("cmpl")
        generations = [
            self._generation(body, model, prompt, f"{request_id}-{at}", origin.seed_of(at))
            for at, prompt in enumerate(prompts)
        ]
        writer = CompletionWriter(origin, model, body, generations)
        return Answering(self.gateway, writer, generations, watch)

    def _generation(
        self, body: CompletionBody, model: ServedModel, prompt: list[int], request_id: str, drawn: int
    ) -> Generation:
        scoring = body.max_tokens == 0
        check_prompt(prompt, model.card)
        wanted = 1 if scoring else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.max_tokens is None:
            wanted = min(wanted, room_for(prompt, None, model.card, "prompt"))
        sampling = sampling_params(
            body,
            model,
            max_tokens=room_for(prompt, wanted, model.card, "prompt"),
            drawn=drawn,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        start = start_of(body, request_id, prompt, sampling)
        return Generation(start, model.tokenizer, body.stops, scoring=scoring)


@dataclass(slots=True)
class _Written:
    """The text of one choice of the answer that has been written."""

    logprobs: LogprobsCollector | None
    echoed: bool = False
    text: list[str] = field(default_factory=list)
    finish: str | None = None


class CompletionWriter(Writer):
    kind = chunk_kind = "text_completion"

    def __init__(
        self, origin: Origin, model: ServedModel, body: CompletionBody, generations: list[Generation]
    ) -> None:
        super().__init__("cmpl", origin, body, len(generations) * body.choices)
        self._tokenizer = model.tokenizer
        self._prompts = body.prompts
        self._generations = generations
        self._echo = bool(body.echo)
        self._n = body.choices
        self._choices = [
            _Written(LogprobsCollector(model.tokenizer) if body.logprobs is not None else None)
            for _ in range(len(generations) * self._n)
        ]
        self._open = b"data: " + encode(self._chunk_head)[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if self._wants_usage else b"]}\n\n"

    def chunk(self, at: int, piece: Piece) -> bytes:
        index = at * self._n + piece.choice
        text, finish, skipped = self._read(at, index, piece), piece.finish, 0
        logprobs = self._choices[index].logprobs
        entries = 0 if logprobs is None else len(logprobs)
        if self._ids is not None:
            known = self._ids.choices[index]
            text, skipped, _ = known.unseen(text, entries, 0, ended=finish is not None)
            finish = None if known.ended else finish
        shown = None if logprobs is None else logprobs.take(skipped)
        if not text and finish is None and entries == skipped:
            return b""
        line = b"" if self._ids is None else self._ids.line(index, text, entries - skipped, 0, bool(finish))
        return b'%b%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            line,
            self._open,
            index,
            encode(text),
            b"null" if shown is None else encode(shown),
            b"null" if finish is None else encode(finish),
            self._close,
        )

    def add(self, at: int, piece: Piece) -> None:
        index = at * self._n + piece.choice
        choice = self._choices[index]
        choice.text.append(self._read(at, index, piece))
        choice.finish = piece.finish or choice.finish

    def answer(self, usage: dict[str, Any]) -> bytes:
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": None if choice.logprobs is None else choice.logprobs.take(),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        return encode({**self._head, "choices": choices, "usage": usage})

    def _read(self, at: int, index: int, piece: Piece) -> str:
        """Returns the piece's text, after the prompt's if that is echoed and has not been yet."""
        choice = self._choices[index]
        text = piece.text
        if self._echo and not choice.echoed:
            choice.echoed = True
            text = self._prompt_text(at) + text
            if choice.logprobs is not None:
                self._add_prompt(at, choice.logprobs)
        if choice.logprobs is not None:
            choice.logprobs.add(piece.tokens)
        return text

    def _add_prompt(self, at: int, logprobs: LogprobsCollector) -> None:
        generation, text = self._generations[at], self._prompts[at]
        tokens = generation.body.prompt
        hidden = self._tokenizer.unseen(text, tokens) if isinstance(text, str) else 0
        logprobs.add_prompt(tokens, generation.prompt_logprobs, hidden=hidden)

    def _prompt_text(self, at: int) -> str:
        """Returns the prompt as text. Given as tokens, it is all that they spell, as their offsets count
        it."""
        prompt = self._prompts[at]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, keep_special=True)
