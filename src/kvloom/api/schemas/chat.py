"""The forms of requests and answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvloom.api.schemas.generation import Answer, Body, GenerationBody, TokenIds, Unserved, Usage, wrong
from kvloom.types.request import MOST_LOGPROBS

MAX_MESSAGES, MAX_TOOLS, MAX_DETOKENIZED = 4096, 128, 1 << 18

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class UnservedType(Body):
    """Something whose type is not served. `why` says so, with `{kind}` in the type's place."""

    why: ClassVar[str]
    type: str

    @model_validator(mode="after")
    def _refuse(self) -> UnservedType:
        raise PydanticCustomError("unserved", self.why, {"kind": self.type[:40]})


class Part(Body):
    texts: ClassVar[frozenset[str]] = frozenset({"text"})
    """The types of parts that are text."""
    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _text_only(self) -> Part:
        if self.type not in {*self.texts, "refusal"}:
            raise PydanticCustomError(
                "part", "parts of type '{kind}' are not served, only text", {"kind": self.type[:40]}
            )
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise PydanticCustomError("part", "a part of type '{kind}' needs its text", {"kind": self.type})
        return self

    @property
    def words(self) -> str:
        return self.text or self.refusal or ""


class CalledFunction(Body):
    name: str
    arguments: str


class PastCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """`reasoning_content` are the thoughts of a past answer, for templates that show them to the model."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    function_call: Annotated[
        None, Unserved("the older form of a call is not served; tool_calls is the newer one")
    ] = None
    audio: Annotated[None, Unserved("no model here speaks or listens")] = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "a {role} message needs content", {"role": self.role})
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionTool(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Verbosity = Literal["low", "medium", "high"]


class ChatBody(GenerationBody):
    """`max_completion_tokens`, or the older `max_tokens`, defaults to all that is left of the context.
    `chat_template_kwargs` are the template's own switches, as vLLM names them; `reasoning_effort` sets those
    of them that are named `reasoning_effort` and `enable_thinking`, and `verbosity` the one of its name."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Annotated[None, Unserved("the older form of tools is not served; tools is the newer one")] = (
        None
    )
    function_call: Annotated[
        None, Unserved("the older form of tool_choice is not served; tool_choice is the newer one")
    ] = None
    modalities: Annotated[None, Unserved("answers are text only", ["text"])] = None
    audio: Annotated[None, Unserved("answers are text only")] = None
    web_search_options: Annotated[None, Unserved("nothing is looked up in the web")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Verbosity | None = None
    chat_template: Annotated[None, Unserved("the model's own template is used")] = None
    documents: Annotated[None, Unserved("not served; a message can hold the documents' text")] = None
    add_generation_prompt: Annotated[
        None, Unserved("an answer always begins after the last message", True)
    ] = None
    continue_final_message: Annotated[
        None, Unserved("an answer always begins after the last message", False)
    ] = None
    echo: Annotated[None, Unserved("served for completions only", False)] = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # of a completion, 0 is right, too

    @model_validator(mode="after")
    def _chat_coherent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
        names = [tool.function.name for tool in self.tools or []]
        if self.tool_choice in ("auto", "required") and not names:
            raise wrong("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong("tool_choice", "tool_choice names a function that is not in tools")
        # A forced call leaves no text of which response_format could speak, and clients send both.
        name = next(iter(self.guides.keys() - {"response_format"}), None)
        if name is not None and self.forces_tool:
            raise wrong(name, f"{name} and a forced tool exclude each other")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class TokenizeBody(Body):
    """A text (`prompt`) or a conversation (`messages`), as vLLM takes them. The model may be left out if one
    alone is served."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: Annotated[
        None, Unserved("a conversation's tokens end after its last message", False)
    ] = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "either prompt or messages is needed")
        return self


class TokenizeAnswer(Answer):
    """token_strs: the tokens as the vocabulary has them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Body):
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_DETOKENIZED)]


class DetokenizeAnswer(Answer):
    prompt: str


class ChatTop(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatTop):
    top_logprobs: list[ChatTop]


class ChatLogprobs(Answer):
    content: list[ChatToken] | None
    refusal: list[ChatToken] | None = None


class FunctionAnswer(Answer):
    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: FunctionAnswer


class MessageAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    index: int
    message: MessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """A call begins with its id and its name; later ones of the same index go on with its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
