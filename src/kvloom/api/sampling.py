"""From OpenAI's parameters to the engine's."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.api.catalog import ServedModel
from kvloom.api.guides import guide_of
from kvloom.api.schemas import GenerationBody
from kvloom.types.errors import BadRequest, PromptTooLong
from kvloom.types.request import Guide, ModelCard, SamplingParams

LEAST_TOP_P = 1e-9  # OpenAI allows 0: the best token alone
STREAM_INTERVAL, STOP_INTERVAL, WHOLE_INTERVAL = 1, 4, 32


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int,
    draw_seed: Callable[[], int],
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    guide: Guide | None = None,
) -> SamplingParams:
    card, ours = model.card, model.card.sampling
    eos = () if body.ignore_eos else card.eos_token_ids
    asked = body.stop_token_ids or []
    _in_vocabulary(asked, card, "stop_token_ids")
    _in_vocabulary(list(body.logit_bias or ()), card, "logit_bias")
    if (body.min_tokens or 0) > max_tokens:
        said = f"min_tokens is {body.min_tokens}, more than the {max_tokens} tokens that may be made"
        raise BadRequest(said, param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw_seed() if body.seed is None else body.seed % 2**63,
        temperature=_or(body.temperature, ours.temperature),
        top_k=max(ours.top_k if body.top_k is None else body.top_k, 0),
        top_p=max(_or(body.top_p, ours.top_p), LEAST_TOP_P),
        min_p=_or(body.min_p, ours.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, ours.repetition_penalty),
        logit_bias=body.logit_bias or {},
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys([*eos, *asked])),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        guide=guide or guide_of(body),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _in_vocabulary(tokens: list[int], card: ModelCard, field: str) -> None:
    if tokens and max(tokens) >= card.vocab_size:
        said = f"{field}: token {max(tokens)} is not in the vocabulary of {card.vocab_size}"
        raise BadRequest(said, param=field)


def check_prompt(prompt: list[int], card: ModelCard) -> None:
    if max(prompt) >= card.vocab_size:
        said = f"prompt: token {max(prompt)} is not in the vocabulary of {card.vocab_size}"
        raise BadRequest(said, param="prompt")


def room_for(
    prompt: list[int], max_tokens: int | None, card: ModelCard, field: str, limit: str = "max_tokens"
) -> int:
    """Tokens that may be made: what was asked for, or all that is left of the context. field, limit: the
    parameters by which the prompt was given, and `max_tokens`."""
    room = card.context_length - len(prompt)
    if room < 1 or (max_tokens or 0) > room:
        asked = f" and {max_tokens} tokens of output were asked for" if max_tokens else ""
        raise PromptTooLong(
            f"the context length of {card.name} is {card.context_length} tokens; "
            f"the prompt has {len(prompt)}{asked}",
            param=field if room < 1 else limit,
        )
    return room if max_tokens is None else max_tokens


def frame_interval(body: GenerationBody) -> int:
    """Who waits for the whole answer takes it in large frames; a stop string must be seen in time."""
    if body.stream:
        return STREAM_INTERVAL
    return STOP_INTERVAL if body.stops else WHOLE_INTERVAL
