"""/v1/completions: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvloom.api.schemas import Answer, GenerationBody, TokenIds, Usage, wrong

MAX_PROMPTS = 1024

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Ids = Annotated[TokenIds, Field(min_length=1)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(GenerationBody):
    """`max_tokens` is 16 where it is absent; 0 asks for the prompt's own log-probabilities (with echo)."""

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _served(self) -> CompletionBody:
        if self.suffix:
            raise wrong("suffix", "suffix is not served: no model here fills in the middle")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One text or one list of tokens for each prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        several: list[str] | list[list[int]] = prompt
        return several


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(Answer):
    """Also the form of a stream's chunks, whose `usage` is null but in the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
