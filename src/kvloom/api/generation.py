"""One request's stream: events from the engine become pieces of text, choice by choice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvloom.api.detokenizer import detokenizer
from kvloom.api.stops import StopStrings
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.client import Server
from kvloom.types.errors import KvloomError, Unavailable
from kvloom.types.request import EndEvent, Event, StartGenerate, TokenEvent, TokenLogprob


@dataclass(slots=True)
class Piece:
    """What one frame brought to one choice. `finish` is set in a choice's last piece."""

    choice: int
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None


class Choice:
    """One of a request's answers: its text so far, and whether it is over."""

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
        shown: list[str] = []
        for event in tokens:
            if event.index != self.made:
                raise KvloomError(
                    f"choice {self.index} lost a token: {event.index} came after {self.made - 1}"
                )
            self.made += 1
            if end is not None and end.stop_token is not None and event is tokens[-1]:
                break
            piece.tokens.append(event)
            shown.append(self._show(self._text.push(event.token)))
            if self._stops is not None and self._stops.hit is not None:
                piece.finish, self.over = "stop", True
                break
        if end is not None and not self.over:
            self._finish(piece, end, shown)
        piece.text = "".join(shown)
        return piece

    def _show(self, text: str) -> str:
        if self._stops is None or self.made < self._min_tokens:
            return text
        return self._stops.push(text)

    def _finish(self, piece: Piece, end: EndEvent, shown: list[str]) -> None:
        if end.reason == "error":
            raise KvloomError(end.message or "the engine could not go on with this request")
        if end.reason == "abort":
            raise Unavailable(end.message or "the request was ended early: the server is stopping")
        shown.append(self._show(self._text.end()))
        if self._stops is not None:
            shown.append(self._stops.end())
            piece.finish = "stop" if self._stops.hit is not None else end.reason
        piece.finish = piece.finish or end.reason
        self.over = True


class Generation:
    """Runs one StartGenerate. `pieces` is the stream; the counts grow as it goes. `scoring`: only the prompt
    is of interest, and the one token that the engine must make is not shown."""

    def __init__(
        self,
        body: StartGenerate,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        keep: frozenset[int] = frozenset(),
        *,
        scoring: bool = False,
    ) -> None:
        self.body = body
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._scoring = scoring
        self._ended: set[int] = set()  # by the engine; a stop string ends a choice here first
        min_tokens = body.sampling.min_tokens
        self.choices = [Choice(index, tokenizer, stops, min_tokens, keep) for index in range(body.n)]

    @property
    def output_tokens(self) -> int:
        return 0 if self._scoring else sum(choice.made for choice in self.choices)

    async def pieces(self, client: Server) -> AsyncGenerator[list[Piece], None]:
        """Ends when every choice is over; closing it, or leaving it early, ends the request in the engine."""
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
                    yield pieces
                if left == 0:
                    return
        raise Unavailable("the engine ended the stream before the answer was complete")

    def _read(self, frame: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        tokens: dict[int, list[TokenEvent]] = {}
        ends: dict[int, EndEvent] = {}
        for event in frame:
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.choice, []).append(event)
            elif isinstance(event, EndEvent):
                ends[event.choice] = event
            else:
                self.prompt_logprobs = event.logprobs
        self._ended.update(ends)
        for index in dict.fromkeys([*tokens, *ends]):
            choice = self.choices[index]
            if not choice.over:
                pieces.append(choice.take(tokens.get(index, []), ends.get(index)))
        self.cached_tokens = max([self.cached_tokens, *(end.cached_tokens for end in ends.values())])
        if self._scoring:
            return [Piece(piece.choice, finish="length") for piece in pieces if piece.finish]
        return pieces
