"""The forms of requests and answers that OpenAI's endpoints share, and those of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, from_json

from kvloom.api.schemas.closing import closed
from kvloom.types.request import MOST_LOGPROBS, Task

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES, MAX_CHOICE = 16, 1024, 1024, 1024


def wrong(field: str, message: str) -> PydanticCustomError:
    """Returns the error of a check across fields, which names the field to change."""
    return PydanticCustomError("field:" + field, message)


@dataclass(frozen=True, slots=True)
class Unserved:
    """Marks a field that is refused with `why`, because an answer that ignored it would be another one than
    was asked for. None passes, and so does `harmless`, which asks for what is done anyway."""

    why: str
    harmless: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None] if self.harmless is None else [None, self.harmless]}

    def _check(self, value: Any) -> None:
        if value is not None and value != self.harmless:
            raise PydanticCustomError("unserved", "{why}", {"why": self.why})


class Body(BaseModel):
    """A request: its types are exact and its numbers finite. Unknown fields pass, as at OpenAI and vLLM,
    but not those that are known to ask for another answer (`Unserved`)."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Answer(BaseModel):
    """An answer, for the OpenAPI document and the tests. The server writes answers without pydantic."""

    model_config = ConfigDict(extra="forbid")


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def _biases(value: Any) -> Any:
    """Returns the biases by token id, which JSON writes as text. Raises at the first that is wrong."""
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
    include_event_ids: bool | None = None


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _close(self) -> JsonSchema:
        self.schema_ = closed(self.schema_, strict=bool(self.strict))
        return self


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


Regex = Annotated[str, Field(min_length=1)]


def _read(text: str) -> str | dict[str, Any]:
    """Returns the schema closed. What is no schema stays as it is, and the engine tells why."""
    try:
        value = from_json(text)
    except ValueError:
        return text
    return closed(value) if isinstance(value, dict) else text


Schema = (
    Annotated[str, Field(min_length=1), AfterValidator(_read)]
    | Annotated[dict[str, Any], AfterValidator(closed)]
)
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


class ModelBody(Body):
    """A request to a model, as far as all endpoints read it."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None

    @property
    def most_tokens(self) -> int | None:
        """Returns the most tokens of a choice, if the request names a number."""
        return None

    @property
    def wants_usage(self) -> bool:
        """Returns whether a stream is to tell the usage."""
        return False

    @property
    def wants_ids(self) -> bool:
        """Returns whether a stream's events are to have ids."""
        return False


class GenerationBody(ModelBody):
    """Parameters of both endpoints. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
    `stop_token_ids`, `priority`, `structured_outputs` and `guided_…` are not OpenAI's own; they are named as
    vLLM names them."""

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
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: Regex | None = None
    guided_json: Schema | None = None
    guided_grammar: Grammar | None = None
    guided_choice: Choice | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: Annotated[None, Unserved("answers are not kept", False)] = None
    use_beam_search: Annotated[None, Unserved("there is no beam search", False)] = None
    include_stop_str_in_output: Annotated[None, Unserved("stop texts are left out of the answer", False)] = (
        None
    )
    truncate_prompt_tokens: Annotated[None, Unserved("prompts are not cut short; send a shorter one")] = None
    allowed_token_ids: Annotated[None, Unserved("not served; logit_bias or a guide keeps tokens away")] = None
    bad_words: Annotated[None, Unserved("not served; logit_bias or a guide keeps tokens away", [])] = None
    logits_processors: Annotated[None, Unserved("no code of a request's is run")] = None
    prompt_logprobs: Annotated[None, Unserved("served for completions, as logprobs with echo")] = None

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
        """Returns what the answer must follow, by the parameter that says so. More than one is refused."""
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
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_ids(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_event_ids)


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
    """`max_model_len` is the context length in tokens, under the name that vLLM gave it. Likewise `parent` is
    the base of an adapter, and `root` the folder that it lies in; of other models `root` is the name. `task`
    says what the model is for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None
    task: Task


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]


MAX_PROMPTS = 1024

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Ids = Annotated[TokenIds, Field(min_length=1)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(GenerationBody):
    """`max_tokens` is 16 if it is left out; 0 asks for the prompt's own log-probabilities (with echo)."""

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _served(self) -> CompletionBody:
        if self.suffix:
            raise wrong("suffix", "suffix is not served: no model here fills in the middle")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Returns one text or one list of tokens for each prompt."""
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
    """The answer to a completion, and a stream's chunk, whose `usage` is null but in the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
