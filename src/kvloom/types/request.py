"""Requests, token events and model cards, as they cross the verbs.

Every wire carries `PROTOCOL` in the header `kvloom-protocol`; peers of unlike versions refuse each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from kvloom.types.address import KVForm
from kvloom.types.errors import BadRequest, PromptTooLong

MOST_LOGPROBS: Final = 20  # alternatives of a token that a request may ask for

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # more neither msgpack nor a tensor holds
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# These are llguidance's options for JSON. If white space is free, an unsure model writes it for ever. Models
# have learned to write one space after a comma and a colon, or none.
JSON_SPACING: dict[str, bool | str] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class Guide(Struct, frozen=True, omit_defaults=True):
    """A grammar that the output must follow."""

    kind: Literal["json", "json_schema", "regex", "lark"]
    text: str = ""  # the schema, the expression or the grammar; empty for "json", which is any JSON object
    param: str = "sampling.guide"  # the client's parameter that an error names


class SamplingParams(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The way in which the tokens of one request are drawn.

    Every random draw is a function of (`seed`, choice, token index) alone, so neither batch nor engine nor a
    crash can change it.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    seed: Seed
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0  # 0 is greedy
    top_k: Count = 0  # 0 keeps all tokens
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # 1 keeps all tokens
    min_p: Unit = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: dict[Int64, float] = {}
    min_tokens: Count = 0  # stop tokens are impossible before
    stop_token_ids: tuple[Int64, ...] = ()  # tokens that end a choice
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None  # alternatives to report
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    guide: Guide | None = None

    @property
    def penalised(self) -> bool:
        """Tells whether the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def plain(self) -> bool:
        """Tells whether the largest logit is the answer and nothing else is asked for."""
        return (
            self.temperature == 0.0
            and self.logprobs is None
            and self.guide is None
            and not self.penalised
            and not self.logit_bias
            and not self.min_tokens
        )


PROTOCOL = "9"

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
RequestId = Annotated[str, Meta(min_length=1, max_length=200)]
Salt = Annotated[str, Meta(max_length=200)]
Prompt = Annotated[list[TokenId], Meta(min_length=1)]
FinishReason = Literal["stop", "length", "abort", "error"]
Task = Literal["generate", "embed", "score"]
"""The task of a model: it goes on with a text, makes a vector of it, or makes one number of a text or of a
pair of texts."""


class Made(Struct, frozen=True, array_like=True):
    """The tokens that a choice has already, in order; none if it has yet to begin."""

    choice: Count
    tokens: list[TokenId]


class StartGenerate(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The body of the verb start_generate: continues `prompt`, `n` times over, as a stream of events."""

    model: str
    request: RequestId
    prompt: Prompt
    sampling: SamplingParams
    # [0, begin) has been received for this request, after prep_recv and remote_send; a negative number counts
    # from the prompt's end.
    begin: Int64 = 0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    # For a request that began elsewhere: each choice named here goes on after its tokens as if all had been
    # made here, and choices left out have ended. If it is empty, all choices begin.
    made: list[Made] = []
    priority: Int64 = 0  # a smaller number is served first
    # The tokens for each open choice that are gathered into a frame; the first token comes at once. A larger
    # number saves work for a caller that does not stream.
    interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    # For whom the request is made: the name of a key, or an address. Queues are fair between tenants.
    tenant: str = ""
    # Prefixes are shared with requests of the same salt only; the empty one is that of all who have none.
    salt: Salt = ""
    # What the model is to do, which must be what it does. If it makes vectors, each choice has a text of its
    # own, and no token: its end has the vector.
    task: Task = "generate"
    more: list[Prompt] = []  # the texts of the choices after the first, whose text is `prompt`
    # For each choice the position from which its tokens are the second text of a pair; empty if none is one.
    pairs: list[Count] = []

    def text_of(self, choice: int) -> list[int]:
        """Returns the tokens with which a choice begins."""
        return self.more[choice - 1] if self.more and choice else self.prompt

    @property
    def choices(self) -> list[Made]:
        """The choices that are to be generated, with the tokens that they have already."""
        return self.made or [Made(choice, []) for choice in range(self.n)]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token's log-probability under the model, and the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(Struct, frozen=True, array_like=True, tag="token"):
    """The token number `index`, counted from 0, of a choice."""

    choice: int
    index: int
    token: int
    logprob: TokenLogprob | None = None


class PromptEvent(Struct, frozen=True, array_like=True, tag="prompt"):
    """The log-probabilities of the prompt's tokens from the second on. It comes once, before any token."""

    logprobs: list[TokenLogprob]


class EndEvent(Struct, frozen=True, array_like=True, tag="end"):
    """The end of a choice."""

    choice: int
    reason: FinishReason
    stop_token: int | None = None  # the token that ended the choice, if one did; it was sent before
    cached_tokens: int = 0
    message: str = ""
    # Of an end with an error that is the request's own doing: the error's code (types/errors.py), and the
    # client's parameter that it names. No other engine would do better.
    code: str = ""
    param: str = ""
    vector: bytes = b""  # what a model makes of a text that makes vectors: numbers of float32, little-endian


Event = TokenEvent | PromptEvent | EndEvent


class SamplingDefaults(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The way in which a model is sampled if a request leaves it open: OpenAI's defaults, or the checkpoint's
    own."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Unit = 1.0
    top_k: Count = 0
    min_p: Unit = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0


class ModelCard(Struct, frozen=True, kw_only=True):
    """The facts of a model that a gateway must know to speak for it."""

    name: str
    path: str
    context_length: int
    vocab_size: int
    tokenizer: str  # a JSON text of the package `tokenizers`
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    architecture: str
    parameters: int
    dtype: str
    kv_dtype: str | None = None  # the number format of K and V; None if that is `dtype`
    sampling: SamplingDefaults = SamplingDefaults()
    form: KVForm | None = None  # the form of its K and V, set by the engine
    parent: str | None = None  # the model whose weights it shares, if it is an adapter
    task: Task = "generate"
    dimensions: int = 0  # of its vectors, if it makes any
    prefix: str = ""  # what texts get in front of them, if it makes vectors

    def __post_init__(self) -> None:
        """Keeps equal tokenizers once: each has megabytes, and a gateway has a card for every replica."""
        force_setattr(self, "tokenizer", sys.intern(self.tokenizer))


class Level(Struct, frozen=True):
    """A level of execution priority (Llumnix, section 4.4): the requests whose `priority` is this number or a
    smaller, more urgent one."""

    priority: int
    headroom: int  # tokens that stay free on a unit for all of the level's requests together


def level_of(priority: int, levels: Iterable[Level]) -> Level | None:
    """Returns the most urgent level that the priority reaches, or None if it reaches none."""
    return min(
        (level for level in levels if priority <= level.priority),
        key=lambda level: level.priority,
        default=None,
    )


def check_prompt(prompt: list[int], card: ModelCard, more: int = 0) -> None:
    """Raises PromptTooLong if the prompt and `more` tokens are too long, or BadRequest for a token that the
    model does not have."""
    if len(prompt) + more > card.context_length:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, and {card.name} holds {card.context_length} in all",
            param="prompt",
        )
    if max(prompt, default=0) >= card.vocab_size:
        raise BadRequest(
            f"prompt token {max(prompt)} is not in {card.name}'s vocabulary of {card.vocab_size}",
            param="prompt",
        )


def check_request(body: StartGenerate, card: ModelCard) -> None:
    """Checks the task, the prompt, room for one more token, `made` and the token ids of the sampling. Raises
    PromptTooLong or BadRequest."""
    check_task(body, card)
    check_prompt(body.prompt, card, more=int(body.task == "generate"))
    _check_made(body, card)
    for param in ("logit_bias", "stop_token_ids"):
        for token in getattr(body.sampling, param):
            if not 0 <= token < card.vocab_size:
                raise BadRequest(
                    f"{param}: token {token} is outside the vocabulary of {card.vocab_size}", param=param
                )


def _check_made(body: StartGenerate, card: ModelCard) -> None:
    choices = [made.choice for made in body.made]
    if len(set(choices)) < len(choices) or max(choices, default=0) >= body.n:
        raise BadRequest(f"made: choices {choices} of {body.n}; each once at most is right", param="made")
    longest = max((len(made.tokens) for made in body.made), default=0)
    if longest > body.sampling.max_tokens or len(body.prompt) + longest > card.context_length:
        raise BadRequest(
            f"made: a choice has {longest} tokens after a prompt of {len(body.prompt)}; max_tokens is "
            f"{body.sampling.max_tokens}, and {card.name} holds {card.context_length} in all",
            param="made",
        )
    if max((token for made in body.made for token in made.tokens), default=0) >= card.vocab_size:
        raise BadRequest(
            f"made: a token is not in {card.name}'s vocabulary of {card.vocab_size}", param="made"
        )
    if longest and body.sampling.prompt_logprobs is not None:
        raise BadRequest(
            "made: choices with tokens have told the prompt's log-probabilities; leave prompt_logprobs out",
            param="made",
        )


def check_task(body: StartGenerate, card: ModelCard) -> None:
    """Raises BadRequest if the model does something else than is asked for, or PromptTooLong for a text that
    it cannot hold."""
    if body.task != card.task:
        raise wrong_task(card, body.task)
    if body.task == "generate":
        if body.more or body.pairs:
            raise BadRequest("more, pairs: a request that generates has one prompt", param="more")
        return
    if body.n != 1 + len(body.more) or len(body.pairs) not in (0, body.n):
        raise BadRequest(
            f"n is {body.n}, for {1 + len(body.more)} texts and {len(body.pairs)} pairs; as many are right",
            param="n",
        )
    for text in body.more:
        check_prompt(text, card)


def route_of(card: ModelCard) -> str:
    """Returns the route under /v1 at which the model is asked."""
    if card.task == "generate":
        return "completions" if card.chat_template is None else "chat/completions"
    return {"embed": "embeddings", "score": "rerank"}[card.task]


def wrong_task(card: ModelCard, task: Task) -> BadRequest:
    """Returns the error of a request for what the model does not do."""
    wanted = {"generate": "generate text", "embed": "make embeddings", "score": "score texts"}
    right = {
        "generate": "/v1/chat/completions or /v1/completions",
        "embed": "/v1/embeddings",
        "score": "/v1/score or /v1/rerank",
    }
    return BadRequest(
        f"model {card.name} does not {wanted[task]}; {right[card.task]} is right for it", param="model"
    )
