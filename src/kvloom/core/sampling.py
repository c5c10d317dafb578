"""How the next token is chosen, as it crosses the verbs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Count = Annotated[int, Meta(ge=0)]
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

    max_tokens: Annotated[int, Meta(ge=1)]
    seed: Seed
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Unit = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: Count = 0
    stop_token_ids: tuple[int, ...] = ()
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
