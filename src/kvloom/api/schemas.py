"""What both endpoints share of OpenAI's request and response forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES, MAX_CHOICE = 16, 1024, 1024, 1024


def wrong(field: str, message: str) -> PydanticCustomError:
    """A check across fields failed; the error names the field to change."""
    return PydanticCustomError("field:" + field, message)


class Body(BaseModel):
    """Requests: exact types, finite numbers. Unknown fields are let pass, as OpenAI and vLLM do."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Answer(BaseModel):
    """Responses: for the OpenAPI document and the tests. The server writes them without pydantic."""

    model_config = ConfigDict(extra="forbid")


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def _biases(value: Any) -> Any:
    """Token ids (JSON keys are text) to numbers, stopping at the first that is wrong."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise PydanticCustomError("bias", f"expected an object of at most {MAX_BIASES} token ids and biases")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        whole = str(token)
        if not (whole.isascii() and whole.isdigit() and len(whole) <= 10):
            raise PydanticCustomError("bias", "keys are token ids, written as decimal numbers")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias", "biases are numbers from -100 to 100")
        biases[int(whole)] = float(bias)
    return biases


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        },
        {"type": "null"},
    ],
    "default": None,
}
Biases = Annotated[dict[int, float] | None, BeforeValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


Regex = Annotated[str, Field(min_length=1)]
Schema = Annotated[str, Field(min_length=1)] | dict[str, Any]
Grammar = Annotated[str, Field(min_length=1)]
Choice = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICE, fail_fast=True)
]


class StructuredOutputs(Body):
    """vLLM's newer form of `guided_regex` and its like."""

    regex: Regex | None = None
    json_: Schema | None = Field(default=None, alias="json")
    grammar: Grammar | None = None
    choice: Choice | None = None


class GenerationBody(Body):
    """Parameters of both endpoints. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
    `stop_token_ids`, `priority`, `structured_outputs` and `guided_…` are not OpenAI's own; they are named as
    vLLM names them."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Biases = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: Regex | None = None
    guided_json: Schema | None = None
    guided_grammar: Grammar | None = None
    guided_choice: Choice | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    @model_validator(mode="after")
    def _coherent(self) -> GenerationBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise wrong("best_of", "best_of is served only where it equals n")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options needs stream to be true")
        first, second = [*self.guides, None, None][:2]
        if second is not None:
            raise wrong(second, f"{first} and {second} exclude each other")
        return self

    @property
    def guides(self) -> dict[str, Any]:
        """What the answer must follow, by the parameter that says so; more than one is refused."""
        form = None if isinstance(self.response_format, TextFormat) else self.response_format
        outputs = self.structured_outputs or StructuredOutputs()
        said = {
            "response_format": form,
            "structured_outputs.regex": outputs.regex,
            "structured_outputs.json": outputs.json_,
            "structured_outputs.grammar": outputs.grammar,
            "structured_outputs.choice": outputs.choice,
            "guided_regex": self.guided_regex,
            "guided_json": self.guided_json,
            "guided_grammar": self.guided_grammar,
            "guided_choice": self.guided_choice,
        }
        return {name: value for name, value in said.items() if value is not None}

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ModelAnswer(Answer):
    """`max_model_len` is the context length in tokens, under the name that vLLM gave it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]
