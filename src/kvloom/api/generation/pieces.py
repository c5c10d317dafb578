"""One request of an engine on its way to text: frames of events become pieces of text, choice by choice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvloom.api.generation.text import StopStrings, detokenizer
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.client import ModelServer
from kvloom.types.errors import KvloomError, Unavailable, WireError
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent, TokenLogprob


@dataclass(slots=True)
class Piece:
    """The part of one frame that one choice got."""

    choice: int
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None
    """The reason why the choice ended; set in its last piece only."""
    stop: str | None = None
    """The stop string that ended it, if one did."""


class Generation:
    """One StartGenerate on its way to text. The counts grow as it goes."""

    def __init__(
        self,
        body: StartGenerate,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        keep: frozenset[int] = frozenset(),
        *,
        scoring: bool = False,
    ) -> None:
        """keep: special tokens that are shown. scoring: only the prompt is of interest, and the one token
        that the engine must make is not shown."""
        self.body = body
        self.cached_tokens = 0
        self.answer_bytes = 0
        """Bytes that the answer has beside those of its text."""
        self.prompt_logprobs: list[TokenLogprob] = []
        self._scoring = scoring
        self._ended: set[int] = set()  # by the engine; a stop string ends a choice here first
        min_tokens = body.sampling.min_tokens
        self.choices = [_Choice(index, tokenizer, stops, min_tokens, keep) for index in range(body.n)]

    @property
    def output_tokens(self) -> int:
        return 0 if self._scoring else sum(choice.made for choice in self.choices)

    async def run(self, client: ModelServer, tell: Callable[[list[Piece]], Awaitable[None]]) -> None:
        """Tells the pieces of each frame as it comes, until every choice is over: the one loop that a stream
        has here. Ended early, it ends the request in the engine. Raises KvloomError if the engine ends a
        choice badly, or the stream too soon."""
        left = len(self.choices)
        async with aclosing(client.start_generate(self.body)) as frames:
            async for frame in frames:
                pieces = self._read(frame)
                over = [piece.choice for piece in pieces if piece.finish is not None]
                left -= len(over)
                if left:
                    for choice in set(over) - self._ended:
                        await client.abort(self.body.request, choice)
                if pieces:
                    await tell(pieces)
                if left == 0:
                    return
        raise Unavailable("the engine ended the stream before the answer was complete")

    def _read(self, frame: list[Event]) -> list[Piece]:
        tokens: dict[int, list[TokenEvent]] = {}
        ends: dict[int, EndEvent] = {}
        for event in frame:
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.choice, []).append(event)
            elif isinstance(event, EndEvent):
                ends[event.choice] = event
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            else:
                self.prompt_logprobs = event.logprobs
        self._ended.update(ends)
        pieces = [
            self.choices[index].take(tokens.get(index, []), ends.get(index))
            for index in dict.fromkeys([*tokens, *ends])
            if not self.choices[index].over
        ]
        if self._scoring:
            return [Piece(piece.choice, finish="length") for piece in pieces if piece.finish]
        return pieces


class _Choice:
    """One of a request's choices: its text so far, and whether it is over."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int, keep: frozenset[int]
    ) -> None:
        self.index = index
        self.made = 0
        self.over = False
        self._text = detokenizer(tokenizer, keep)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens

    def take(self, tokens: list[TokenEvent], end: EndEvent | None) -> Piece:
        piece = Piece(self.index)
        stopped = end is not None and end.stop_token is not None
        for event in tokens:
            if event.index != self.made:
                raise KvloomError(
                    f"choice {self.index} lost a token: {event.index} came after {self.made - 1}"
                )
            self.made += 1
            if stopped and event is tokens[-1]:
                break
            piece.tokens.append(event)
            text = self._text.push(event.token)
            piece.text += text if self._stops is None else self._shown(text)
            if self._stops is not None and self._stops.hit is not None:
                piece.finish, piece.stop, self.over = "stop", self._stops.hit, True
                break
        if end is not None and not self.over:
            self._finish(piece, end)
        return piece

    def _shown(self, text: str) -> str:
        return text if self._stops is None or self.made < self._min_tokens else self._stops.push(text)

    def _finish(self, piece: Piece, end: EndEvent) -> None:
        if end.reason == "error":
            message = end.message or "the engine could not go on with this request"
            raise KvloomError.from_wire(WireError(end.code, message, end.param or None))
        if end.reason == "abort":
            raise Unavailable(end.message or "the request was ended early: the server is stopping")
        piece.text += self._shown(self._text.end())
        piece.finish = end.reason
        if self._stops is not None:
            piece.text += self._stops.end()
            if self._stops.hit is not None:
                piece.finish, piece.stop = "stop", self._stops.hit
        self.over = True
