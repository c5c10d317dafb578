"""The forms of requests and answers of Ollama's API, and what a request is as a chat or a completion of
OpenAI's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvloom.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatBody, FunctionTool
from kvloom.api.schemas.embeddings import EmbeddingBody, Text, Texts
from kvloom.api.schemas.generation import (
    Answer,
    Body,
    CompletionBody,
    GenerationBody,
    StopList,
    StopString,
    Unserved,
    wrong,
)

Name = Annotated[str, Field(min_length=1, max_length=512)]
_NO_IMAGES = "images are not served, only text"
_NO_LOGPROBS = "not served here; logprobs of /v1/chat/completions is"


class ContextLimit(GenerationBody):
    """A request with a context of the client's choice. By itself it asks for nothing but that the model be
    there."""

    num_ctx: int | None = None


class ChatOfOllama(ContextLimit, ChatBody):
    """A request with messages."""


class CompletionOfOllama(ContextLimit, CompletionBody):
    """A request with a prompt that goes to the model as it is."""

    prompt: str


class OllamaFunctionCall(Body):
    name: str
    arguments: dict[str, Any]


class OllamaPastCall(Body):
    id: str | None = None
    function: OllamaFunctionCall


class OllamaTurn(Body):
    """`thinking` are the thoughts of a past answer, for templates that show them to the model."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaPastCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[None, Unserved(_NO_IMAGES, [])] = None

    def message(self) -> dict[str, Any]:
        """Returns the turn as a message of OpenAI's."""
        calls = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": _json(call)}}
            for call in self.tool_calls or []
        ]
        return {
            "role": self.role,
            "content": self.content or "",
            "reasoning_content": self.thinking or None,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }


def _json(call: OllamaPastCall) -> str:
    return json.dumps(call.function.arguments)


class OllamaTool(Body):
    type: Literal["function"] = "function"
    function: FunctionTool


class OllamaOptions(Body):
    """Options of how a model is loaded, such as `num_gpu`, pass without effect. `num_predict` of 0 or less is
    all that is left of the context. `repeat_penalty` looks at the whole text, whatever `repeat_last_n`
    says."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    num_ctx: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | StopList | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    typical_p: Annotated[None, Unserved("not served; top_p and min_p are", 1.0)] = None
    tfs_z: Annotated[None, Unserved("not served; top_p and min_p are", 1.0)] = None
    mirostat: Annotated[None, Unserved("not served; temperature, top_p and min_p are", 0)] = None

    def fields(self) -> dict[str, Any]:
        """Returns the options under OpenAI's names."""
        most = self.num_predict or 0
        return self.model_dump(exclude={"num_predict", "repeat_penalty"}, exclude_none=True) | {
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": most if most > 0 else None,
        }


class OllamaBody(Body):
    """`keep_alive` passes without effect: weights stay, or sleep as the server's memory wants it."""

    model: Name
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: Annotated[None, Unserved(_NO_LOGPROBS, False)] = None
    top_logprobs: Annotated[None, Unserved(_NO_LOGPROBS, 0)] = None

    def _common(self) -> dict[str, Any]:
        fields = (self.options or OllamaOptions()).fields()
        fields |= {"model": self.model, "stream": self.stream is not False}
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields

    def _chat(self, messages: list[dict[str, Any]], **more: Any) -> ChatOfOllama:
        efforts: dict[Any, str] = {True: "medium", False: "none"}
        effort = None if self.think is None else efforts.get(self.think, self.think)
        fields = self._common() | {"messages": messages, "reasoning_effort": effort}
        return ChatOfOllama.model_validate(fields | more)


class OllamaChatBody(OllamaBody):
    """`stream` is true if it is left out. Without messages the answer only says that the model is there."""

    messages: Annotated[list[OllamaTurn], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> OllamaChatBody:
        if self.messages and self.messages[-1].role == "assistant":
            said = "messages: an answer begins after the last message, which cannot be the assistant's"
            raise wrong("messages", said)
        return self

    def asked(self) -> ContextLimit:
        """Returns the same request in OpenAI's form. Raises ValidationError."""
        if not self.messages:
            return ContextLimit.model_validate(self._common())
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        return self._chat([turn.message() for turn in self.messages], tools=tools or None)


class OllamaGenerateBody(OllamaBody):
    """`stream` is true if it is left out. Without a prompt the answer only says that the model is there. With
    `raw` the prompt goes to the model as it is, and without the model's template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[None, Unserved("not served: no model here fills in the middle", "")] = None
    template: Annotated[
        None, Unserved("the model's own template is used; raw takes a prompt that is made already", "")
    ] = None
    context: Annotated[None, Unserved("not served; messages of /api/chat are", [])] = None
    images: Annotated[None, Unserved(_NO_IMAGES, [])] = None

    @model_validator(mode="after")
    def _raw_alone(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise wrong("system", "system: raw takes the prompt alone; write the system's text into it")
        return self

    def asked(self) -> ContextLimit:
        """Returns the same request in OpenAI's form. Raises ValidationError."""
        if not self.prompt:
            return ContextLimit.model_validate(self._common())
        if self.raw:
            return CompletionOfOllama.model_validate(self._common() | {"prompt": self.prompt})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat([*system, {"role": "user", "content": self.prompt}])


class EmbeddingsOfOllama(EmbeddingBody):
    """A request for embeddings, whose texts may lose their end."""

    truncate: bool = True

    @property
    def cut(self) -> bool:
        return self.truncate


class OllamaEmbedBody(Body):
    """`truncate` is true if it is left out. `options` and `keep_alive` pass without effect."""

    model: Name
    input: Text | Texts
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    def asked(self) -> EmbeddingsOfOllama:
        """Returns the same request in OpenAI's form."""
        fields = self.model_dump(exclude_none=True)
        return EmbeddingsOfOllama.model_validate(fields)


class OllamaEmbeddingsBody(Body):
    """The older form, of one text."""

    model: Name
    prompt: Text

    def asked(self) -> EmbeddingsOfOllama:
        """Returns the same request in OpenAI's form."""
        return EmbeddingsOfOllama(model=self.model, input=self.prompt)


class OllamaShowBody(Body):
    """`name` is the older name of `model`."""

    model: Name | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _named(self) -> OllamaShowBody:
        if self.model is None and self.name is None:
            raise wrong("model", "model: the name of a model is needed")
        return self

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class OllamaCalledFunction(Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Answer):
    id: str
    function: OllamaCalledFunction


class OllamaMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaAnswer(Answer):
    """The counts and times stand in the last answer of a stream, or in the only one. Times are in
    nanoseconds. A whole answer's `eval_duration` is that of prompt and answer together, because its tokens
    come many at a time; `prompt_eval_duration` is a stream's."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None


class OllamaEmbedAnswer(Answer):
    """Times are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(Answer):
    embedding: list[float]


class OllamaDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    """The number format in which the model computes."""


class OllamaTag(Answer):
    name: str
    model: str
    modified_at: str
    """The time at which the gateway started."""
    size: int
    """Always 0: a gateway does not know the files."""
    digest: str
    """Of the model's name, path and form, not of its files."""
    details: OllamaDetails


class OllamaTags(Answer):
    models: list[OllamaTag]


class OllamaProcess(Answer):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    """A time that does not come: nobody is timed out."""
    size_vram: int
    context_length: int


class OllamaProcesses(Answer):
    models: list[OllamaProcess]


class OllamaShow(Answer):
    modelfile: str
    parameters: str
    """The model's own sampling parameters, one on a line."""
    template: str
    """The chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


class OllamaVersion(Answer):
    version: str


class OllamaError(Answer):
    error: str
