"""What crosses the verbs: requests, token events and the cards of the models an engine serves.

Every wire carries `PROTOCOL` in the header `kvloom-protocol`; peers of unlike versions refuse each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvloom.core.address import KVForm
from kvloom.core.sampling import Count, SamplingParams, Unit

PROTOCOL = "5"

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
RequestId = Annotated[str, Meta(min_length=1, max_length=200)]
Prompt = Annotated[list[TokenId], Meta(min_length=1)]
FinishReason = Literal["stop", "length", "abort", "error"]


class Made(Struct, frozen=True, array_like=True):
    """What a choice has already: tokens, the first one first; none where it has yet to begin."""

    choice: Annotated[int, Meta(ge=0)]
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
    begin: int = 0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    made: list[Made] = []
    priority: int = 0
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
