"""What crosses the verbs: requests, token events and the cards of the models an engine serves.

Every wire carries `PROTOCOL` in the header `kvloom-protocol`; peers of unlike versions refuse each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvloom.types.transfer import KVForm

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # more neither msgpack nor a tensor holds
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# llguidance's options for JSON. Left free, white space is what an unsure model writes for ever. Models have
# learned to write one space after a comma and a colon, or none.
JSON_SPACING: dict[str, bool | str] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class Guide(Struct, frozen=True, omit_defaults=True):
    """A grammar the output must follow. `text` is the JSON schema, the regular expression or the Lark
    grammar; for "json" (any JSON object) it is empty. `param` is the client's parameter that says so, which
    an error names."""

    kind: Literal["json", "json_schema", "regex", "lark"]
    text: str = ""
    param: str = "sampling.guide"


class SamplingParams(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request's sampling. Every random draw is a function of (`seed`, choice, token index) alone, so
    neither batch nor engine nor a crash can change it.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. `stop_token_ids` end a choice; they
    are impossible before `min_tokens`. `logprobs` is the number of alternatives to report, None for none at
    all; `prompt_logprobs` the same for the prompt's own tokens.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    seed: Seed
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Unit = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: dict[Int64, float] = {}
    min_tokens: Count = 0
    stop_token_ids: tuple[Int64, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    guide: Guide | None = None

    @property
    def penalised(self) -> bool:
        """True where the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def plain(self) -> bool:
        """True where the largest logit is the answer and nothing else is asked for."""
        return (
            self.temperature == 0.0
            and self.logprobs is None
            and self.guide is None
            and not self.penalised
            and not self.logit_bias
            and not self.min_tokens
        )


PROTOCOL = "5"

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
RequestId = Annotated[str, Meta(min_length=1, max_length=200)]
Prompt = Annotated[list[TokenId], Meta(min_length=1)]
FinishReason = Literal["stop", "length", "abort", "error"]


class Made(Struct, frozen=True, array_like=True):
    """What a choice has already: tokens, the first one first; none where it has yet to begin."""

    choice: Count
    tokens: list[TokenId]


class StartGenerate(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of the verb start_generate: continue `prompt`, `n` times over, as a stream of events.

    `made` is for a request that began elsewhere: each choice named there goes on after its tokens as if all
    had been made here, and those left out have ended. Empty, all begin.

    [0, begin) has been received for this request id, after prep_recv and remote_send; a negative `begin`
    counts from the prompt's end. A smaller `priority` is served first. Events reach the caller in frames of
    up to `interval` tokens a choice, the first token at once; who does not stream saves both sides work with
    a larger one.
    """

    model: str
    request: RequestId
    prompt: Prompt
    sampling: SamplingParams
    begin: Int64 = 0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    made: list[Made] = []
    priority: Int64 = 0
    interval: Annotated[int, Meta(ge=1, le=1024)] = 1

    @property
    def choices(self) -> list[Made]:
        """Those that are to be generated, with what they have already."""
        return self.made or [Made(choice, []) for choice in range(self.n)]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token's log-probability under the model and the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(Struct, frozen=True, array_like=True, tag="token"):
    """Token number `index` (from 0) of choice `choice`."""

    choice: int
    index: int
    token: int
    logprob: TokenLogprob | None = None


class PromptEvent(Struct, frozen=True, array_like=True, tag="prompt"):
    """Log-probabilities of the prompt's tokens from the second on, once, before any token."""

    logprobs: list[TokenLogprob]


class EndEvent(Struct, frozen=True, array_like=True, tag="end"):
    """The choice is over. `stop_token` is the token that ended it, where one did; it was sent before."""

    choice: int
    reason: FinishReason
    stop_token: int | None = None
    cached_tokens: int = 0
    message: str = ""


Event = TokenEvent | PromptEvent | EndEvent


class SamplingDefaults(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a model is sampled where a request leaves it open: OpenAI's ways, or the checkpoint's own."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Unit = 1.0
    top_k: Count = 0
    min_p: Unit = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a gateway must know of a model to speak for it. `tokenizer` is a `tokenizers` JSON text; `form` is
    how the engine that serves it keeps its K and V, set by the engine."""

    name: str
    path: str
    context_length: int
    vocab_size: int
    tokenizer: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    architecture: str
    parameters: int
    dtype: str
    sampling: SamplingDefaults = SamplingDefaults()
    form: KVForm | None = None


class Level(Struct, frozen=True):
    """For requests whose `priority` is this number or a smaller, more urgent one. headroom: tokens that stay
    free on a unit for all of the level's requests there together."""

    priority: int
    headroom: int


def level_of(priority: int, levels: Iterable[Level]) -> Level | None:
    """The most urgent level that the priority is as urgent as; None where it is below all."""
    return min(
        (level for level in levels if priority <= level.priority),
        key=lambda level: level.priority,
        default=None,
    )
