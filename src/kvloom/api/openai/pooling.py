"""/v1/embeddings as OpenAI has it, and /v1/rerank and /v1/score as vLLM and Cohere have them: from texts to
vectors, and from vectors to answers."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Raw
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.generation.answering import Answering, EndpointContext, Writer, encode
from kvloom.api.generation.pieces import Generation, Piece
from kvloom.api.generation.resume import Origin
from kvloom.api.generation.sampling import check_prompt
from kvloom.api.metrics import Watch
from kvloom.api.schemas.embeddings import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from kvloom.api.texts.prompts import PlainPrompt, too_long
from kvloom.types.client import ModelServer
from kvloom.types.errors import BadRequest, KvloomError, Unavailable, WireError
from kvloom.types.request import EndEvent, SamplingParams, StartGenerate, Task

TEXTS: Final = 32  # of one request to an engine, which makes at most a few of its jobs
AT_ONCE: Final = 4  # such requests of one client's request
MOST_TOKENS: Final = 1 << 20  # of one client's request: a short body asks for many if a query is in each pair
Vectors = npt.NDArray[np.float32]
NUMBER_BYTES: Final = 24  # of a number of a vector in an answer, at most
Keep = Callable[[bytes], Any]
"""Takes a vector as it comes, and returns what is kept of it: large answers are made bit by bit, since nobody
else's stream goes on meanwhile."""
WriteVectors = Callable[[dict[str, Any], list[Any], dict[str, int]], Any]
"""Makes an answer of its head, what was kept of the vectors, and the usage."""


class PoolingRequest(Generation):
    """One StartGenerate on its way to a vector of each of its texts."""

    def __init__(self, body: StartGenerate, model: ServedModel, keep: Keep) -> None:
        super().__init__(body, model.tokenizer, scoring=True)
        self.answer_bytes = NUMBER_BYTES * model.card.dimensions * body.n
        self.vectors: dict[int, Any] = {}
        self._keep = keep

    async def run(self, client: ModelServer, tell: Callable[[list[Piece]], Awaitable[None]]) -> None:
        """Keeps the vectors as they come. Raises KvloomError as `Generation.run` does."""
        async with aclosing(client.start_generate(self.body)) as frames:
            async for frame in frames:
                for event in frame:
                    if isinstance(event, EndEvent):
                        self.vectors[event.choice] = self._keep(_vector(event))
                if len(self.vectors) == self.body.n:
                    return
        raise Unavailable("the engine ended the stream before the answer was complete")


def _vector(end: EndEvent) -> bytes:
    if end.reason == "error":
        message = end.message or "the engine could not go on with this request"
        raise KvloomError.from_wire(WireError(end.code, message, end.param or None))
    if end.reason == "abort" or not end.vector:
        raise Unavailable(end.message or "the request was ended early: the server is stopping")
    return end.vector


@dataclass(frozen=True, slots=True)
class _Text:
    """A text's tokens, and the position from which they are the second text of a pair; 0 if it is none."""

    tokens: list[int]
    second: int = 0


class PoolingWriter(Writer):
    """Makes the answer of all vectors."""

    kind = chunk_kind = "list"

    def __init__(
        self,
        prefix: str,
        origin: Origin,
        body: PoolingBody,
        generations: Sequence[PoolingRequest],
        write: WriteVectors,
    ) -> None:
        super().__init__(prefix, origin, body, len(generations))
        self._generations = generations
        self._write = write

    def chunk(self, at: int, piece: Piece) -> bytes:
        """Returns nothing: such an answer is never streamed."""
        return b""

    def add(self, at: int, piece: Piece) -> None:
        """Does nothing: the texts keep their vectors."""

    def answer(self, usage: dict[str, Any]) -> bytes:
        kept = [one.vectors[choice] for one in self._generations for choice in range(one.body.n)]
        prompt = usage["prompt_tokens"]
        return encode(self._write(self._head, kept, {"prompt_tokens": prompt, "total_tokens": prompt}))


@dataclass(frozen=True, slots=True)
class EmbeddingEndpoint:
    gateway: EndpointContext

    async def __call__(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(parse, EmbeddingBody), self._prepare)

    async def _prepare(
        self, body: EmbeddingBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        def write(head: dict[str, Any], kept: list[Any], usage: dict[str, int]) -> dict[str, Any]:
            data = [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(kept)]
            return {"object": "list", "data": data, "model": head["model"], "usage": usage}

        return await embeddings(self.gateway, "embd", origin, body, model, tenant, watch, write)


async def embeddings(
    gateway: EndpointContext,
    prefix: str,
    origin: Origin,
    body: EmbeddingBody,
    model: ServedModel,
    tenant: str,
    watch: Watch,
    write: WriteVectors,
) -> Answering:
    """Returns what asks engines for the vectors of a request's texts. prefix: of the answer's id; write:
    makes the answer of them. Raises KvloomError."""
    _require(model, "embed")
    size, card = body.dimensions, model.card
    if size is not None and size > card.dimensions:
        raise BadRequest(
            f"dimensions: {size}, and the vectors of {card.name} have {card.dimensions}; at most as many are "
            "right",
            param="dimensions",
        )
    prompts = [
        PlainPrompt(card.prefix + one, param="input") if isinstance(one, str) else one for one in body.texts
    ]
    texts = await _tokens(model, prompts, tenant, "input", "embed", cut=body.cut)
    coded = body.encoding_format == "base64"

    def keep(vector: bytes) -> Raw:
        numbers = np.frombuffer(vector, "<f4")
        if size is not None:
            numbers = _unit(numbers[None, :size])[0]
        return Raw(encode(b64encode(numbers.tobytes()).decode() if coded else numbers.tolist()))

    return _answering(gateway, prefix, origin, body, model, texts, watch, keep, write)


@dataclass(frozen=True, slots=True)
class ScoreEndpoints:
    """Scores of pairs of texts: a cross-encoder's, or of two embeddings the cosine of their angle."""

    gateway: EndpointContext

    async def score(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(parse, ScoreBody), self._prepare_score)

    async def rerank(self, request: Request) -> Response:
        return await self.gateway.answer(request, partial(parse, RerankBody), self._prepare_rerank)

    async def _prepare_score(
        self, body: ScoreBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        def write(head: dict[str, Any], scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
            data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
            return {**head, "data": data, "usage": usage}

        return await self._prepared("score", body, body.pairs, model, watch, tenant, origin, write)

    async def _prepare_rerank(
        self, body: RerankBody, model: ServedModel, watch: Watch, tenant: str, origin: Origin
    ) -> Answering:
        pairs = [(body.query, text) for text in body.texts]

        def write(head: dict[str, Any], scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
            best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]
            results: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in best]
            if body.return_documents is not False:
                for result in results:
                    result["document"] = {"text": pairs[result["index"]][1]}
            return {"id": head["id"], "model": head["model"], "usage": usage, "results": results}

        return await self._prepared("rerank", body, pairs, model, watch, tenant, origin, write)

    async def _prepared(
        self,
        prefix: str,
        body: PoolingBody,
        pairs: list[tuple[str, str]],
        model: ServedModel,
        watch: Watch,
        tenant: str,
        origin: Origin,
        write: Callable[[dict[str, Any], list[float], dict[str, int]], dict[str, Any]],
    ) -> Answering:
        """Prepares the scores of pairs. write: makes the answer of them."""
        params = ("query", "documents") if prefix == "rerank" else ("text_1", "text_2")
        if model.card.task != "embed":
            _require(model, "score")
            texts = await _pairs(model, pairs, tenant, params)
            return _answering(
                *(self.gateway, prefix, origin, body, model, texts, watch, bytes),
                lambda head, kept, usage: write(head, _stacked(kept)[:, 0].tolist(), usage),
            )
        sides = {text: param for pair in reversed(pairs) for text, param in zip(pair, params, strict=True)}
        places = {text: at for at, text in enumerate(sides)}
        prompts = [PlainPrompt(model.card.prefix + text, param=param) for text, param in sides.items()]
        texts = await _tokens(model, prompts, tenant, params[1], "embed")

        def compare(head: dict[str, Any], kept: list[bytes], usage: dict[str, int]) -> dict[str, Any]:
            units = _unit(_stacked(kept))
            first, last = ([places[pair[side]] for pair in pairs] for side in (0, 1))
            return write(head, np.einsum("ij,ij->i", units[first], units[last]).tolist(), usage)

        return _answering(self.gateway, prefix, origin, body, model, texts, watch, bytes, compare)


def _require(model: ServedModel, task: Task) -> None:
    check_prompt([0], model.card, task)


def _stacked(kept: list[bytes]) -> Vectors:
    return np.frombuffer(b"".join(kept), "<f4").reshape(len(kept), -1)


def _unit(vectors: Vectors) -> Vectors:
    """Returns the vectors at the length 1."""
    unit: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


async def _tokens(
    model: ServedModel,
    prompts: Sequence[PlainPrompt | list[int]],
    tenant: str,
    param: str,
    task: Task,
    *,
    cut: bool = False,
) -> list[_Text]:
    """Returns the tokens of prompts. cut: whether what is too long loses its end. Raises KvloomError."""
    most, longest = model.card.context_length, model.tokenizer.most_bytes
    if cut:
        read = None if longest is None else most * longest  # what cannot fit need not be read
        prompts = [
            replace(one, text=one.text[:read], bounded=False) if isinstance(one, PlainPrompt) else one
            for one in prompts
        ]
    texts, count = list[list[int]](), 0
    plain = [one for one in prompts if isinstance(one, PlainPrompt)]
    async with aclosing(model.tokens_of(plain, tenant)) as encoded:
        for one in prompts:
            texts.append(await anext(encoded) if isinstance(one, PlainPrompt) else one)
            count += min(len(texts[-1]), most)
            if count > MOST_TOKENS:
                many = f"{param}: more than {MOST_TOKENS} tokens in all"
                raise BadRequest(f"{many}; fewer texts, or shorter ones, are right", param=param)
    if cut and max(map(len, texts)) > most:
        end = await _ending(model, tenant)
        texts = [one if len(one) <= most else one[: most - end] + one[len(one) - end :] for one in texts]
    for text in texts:
        check_prompt(text, model.card, task, param)
        if len(text) > most:
            raise too_long(model.card, param, len(text))
    return [_Text(text) for text in texts]


async def _ending(model: ServedModel, tenant: str) -> int:
    """Returns how many tokens the tokenizer puts behind every text."""
    whole = await model.tokens(PlainPrompt("a"), tenant)
    inner = await model.tokens(PlainPrompt("a", special=False), tenant)
    begins = (at for at in range(len(whole)) if whole[at : at + len(inner)] == inner)
    return len(whole) - next(begins, len(whole) - len(inner)) - len(inner)


async def _pairs(
    model: ServedModel, pairs: list[tuple[str, str]], tenant: str, params: tuple[str, str]
) -> list[_Text]:
    """Returns the tokens of pairs, in the form that the model's tokenizer has for them. The second text
    begins at the end of the first one's own form. params: the parameters that have the first ones and the
    second ones."""
    param, other = params
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    plain = await _tokens(model, [PlainPrompt(one, param=param) for one in firsts], tenant, param, "score")
    alone = dict(zip(firsts, plain, strict=True))
    both = [PlainPrompt(first, second=second, param=other) for first, second in pairs]
    texts = await _tokens(model, both, tenant, other, "score")
    return [
        _Text(text.tokens, len(alone[first].tokens)) for text, (first, _) in zip(texts, pairs, strict=True)
    ]


def _answering(
    gateway: EndpointContext,
    prefix: str,
    origin: Origin,
    body: PoolingBody,
    model: ServedModel,
    texts: list[_Text],
    watch: Watch,
    keep: Keep,
    write: WriteVectors,
) -> Answering:
    request = origin.request_id(prefix)
    generations = [
        PoolingRequest(_start(body, model, part, f"{request}-{at}"), model, keep)
        for at, part in enumerate(_parts(texts))
    ]
    writer = PoolingWriter(prefix, origin, body, generations, write)
    return Answering(gateway, writer, generations, watch, at_once=AT_ONCE)


def _parts(texts: list[_Text]) -> list[list[_Text]]:
    return [texts[at : at + TEXTS] for at in range(0, len(texts), TEXTS)]


def _start(body: PoolingBody, model: ServedModel, texts: Sequence[_Text], request: str) -> StartGenerate:
    first, *more = texts
    return StartGenerate(
        model=body.model,
        request=request,
        prompt=first.tokens,
        sampling=SamplingParams(max_tokens=1, seed=0),
        n=len(texts),
        priority=body.priority or 0,
        task=model.card.task,
        more=[text.tokens for text in more],
        pairs=[text.second for text in texts] if any(text.second for text in texts) else [],
    )
