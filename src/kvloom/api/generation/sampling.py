"""Turns OpenAI's parameters into the engine's, and log-probabilities into OpenAI's two forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from kvloom.api.catalog import ServedModel
from kvloom.api.schemas.generation import GenerationBody, JsonObjectFormat, JsonSchemaFormat
from kvloom.api.texts.prompts import context_message
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.errors import BadRequest, PromptTooLong
from kvloom.types.request import (
    Guide,
    ModelCard,
    SamplingParams,
    StartGenerate,
    Task,
    TokenEvent,
    TokenLogprob,
    wrong_task,
)

LEAST_TOP_P = 1e-9  # OpenAI allows 0, which leaves the best token alone.
STREAM_INTERVAL, STOP_INTERVAL, WHOLE_INTERVAL = 1, 4, 32


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int,
    drawn: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    guide: Guide | None = None,
) -> SamplingParams:
    """drawn: the seed if the body gives none."""
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
        seed=drawn if body.seed is None else body.seed % 2**63,
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


def check_prompt(prompt: list[int], card: ModelCard, task: Task = "generate", param: str = "prompt") -> None:
    """Raises BadRequest if the model does not do what is asked of the prompt, or lacks a token of it."""
    if card.task != task:
        raise wrong_task(card, task)
    if max(prompt) >= card.vocab_size:
        said = f"{param}: token {max(prompt)} is not in the vocabulary of {card.vocab_size}"
        raise BadRequest(said, param=param)


def room_for(
    prompt: list[int], max_tokens: int | None, card: ModelCard, field: str, limit: str = "max_tokens"
) -> int:
    """Returns how many tokens may be made: what was asked for, or all that is left of the context.

    Raises PromptTooLong, which names `field` or `limit`: the parameters by which the prompt and `max_tokens`
    were given.
    """
    room = card.context_length - len(prompt)
    if room < 1 or (max_tokens or 0) > room:
        most = len(prompt) + (max_tokens or 0)
        completion = f", {max_tokens} in the completion" if max_tokens else ""
        raise PromptTooLong(
            f"{context_message(card)}. However, you requested {most} tokens ({len(prompt)} in the {field}"
            f"{completion}). Please reduce the length of the {field} or completion.",
            param=field if room < 1 else limit,
        )
    return room if max_tokens is None else max_tokens


def start_of(
    body: GenerationBody, request: str, prompt: list[int], sampling: SamplingParams
) -> StartGenerate:
    """Returns what the engine is asked for one prompt. A frame has many tokens of a whole answer, and fewer
    if a stop string must be seen in time."""
    whole = STOP_INTERVAL if body.stops else WHOLE_INTERVAL
    return StartGenerate(
        model=body.model,
        request=request,
        prompt=prompt,
        sampling=sampling,
        n=body.choices,
        priority=body.priority or 0,
        interval=STREAM_INTERVAL if body.stream else whole,
    )


def guide_of(body: GenerationBody) -> Guide | None:
    """Returns the guide that a request asks for. The form of requests allows no second."""
    for name, value in body.guides.items():
        return _guide(name, value)
    return None


def _guide(name: str, value: Any) -> Guide:
    if isinstance(value, JsonObjectFormat):
        return Guide("json", param=name)
    if isinstance(value, JsonSchemaFormat):
        return Guide("json_schema", _json(value.json_schema.schema_), name)
    if name.endswith("regex"):
        return Guide("regex", value, name)
    if name.endswith("json"):
        return Guide("json_schema", value if isinstance(value, str) else _json(value), name)
    if name.endswith("choice"):
        value = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
    return Guide("lark", value, name)


def _json(schema: dict[str, Any]) -> str:
    """Returns the schema as it was read. The json module would take five times as long for a large one, on
    the event loop; msgspec does not write integers of more than 64 bits."""
    return to_json(schema).decode()


LOWEST = -9999.0  # OpenAI writes it for a probability of 0, because JSON has no infinity.


def chat_logprobs(tokens: Iterable[TokenEvent], tokenizer: Tokenizer, top: int) -> list[dict[str, Any]]:
    content = []
    for event in tokens:
        known = event.logprob or TokenLogprob(LOWEST)
        entry = _chat_entry(event.token, known.logprob, tokenizer)
        entry["top_logprobs"] = [_chat_entry(token, value, tokenizer) for token, value in known.top[:top]]
        content.append(entry)
    return content


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    text = spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}


class LogprobsCollector:
    """Collects the log-probabilities of a choice's tokens in the form of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._entries: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], *, hidden: int = 0) -> None:
        """Adds the prompt's tokens. Nothing is known of the first, as nothing stands before it.

        The first `hidden` tokens are left out, because the text that is shown has them not.
        """
        for at, token in enumerate(prompt):
            if at >= hidden:
                self._add(token, logprobs[at - 1] if 0 < at <= len(logprobs) else None)

    def add(self, tokens: Iterable[TokenEvent]) -> None:
        for event in tokens:
            self._add(event.token, event.logprob)

    def __len__(self) -> int:
        """Returns how many tokens have been added since the last time that they were taken."""
        return len(self._entries)

    def take(self, skipped: int = 0) -> dict[str, Any]:
        """Returns what has been added since the last time, without the first `skipped` tokens of it."""
        entries, self._entries = self._entries[skipped:], []
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [entry[2] for entry in entries],
            "text_offset": [entry[3] for entry in entries],
        }

    def _add(self, token: int, known: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token)
        if known is None:
            self._entries.append((text, None, None, self._offset))
        else:
            # The drawn token is always among them, even if it is not one of the best.
            best = {self._tokenizer.token_text(one): max(value, LOWEST) for one, value in known.top}
            best.setdefault(text, max(known.logprob, LOWEST))
            self._entries.append((text, max(known.logprob, LOWEST), best, self._offset))
        self._offset += len(text)
