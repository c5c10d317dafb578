"""The forms of requests and answers of /v1/responses, and what a request is as a chat of OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Tag, TypeAdapter, WithJsonSchema, model_validator
from pydantic.types import Discriminator

from kvloom.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatBody, Part, ToolName, UnservedType, Verbosity
from kvloom.api.schemas.generation import Answer, Body, JsonObjectFormat, TextFormat, Unserved, wrong

LOGPROBS = "message.output_text.logprobs"


class ContentPart(Part):
    texts = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def _chat_content(content: Content) -> Any:
    """Returns the content as a chat has it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.words} for part in content]


class MessageItem(Body):
    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @property
    def words(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(one.words for one in self.content)

    def kept(self) -> dict[str, Any]:
        """Returns the item as answers list it."""
        parts: list[dict[str, Any]]
        kind = "output_text" if self.role == "assistant" else "input_text"
        if isinstance(self.content, str):
            parts = [{"type": kind, "text": self.content}]
        else:
            parts = [one.model_dump(exclude_none=True) for one in self.content]
        if self.role == "assistant":
            parts = [{"annotations": []} | part if "text" in part else part for part in parts]
        status = {"status": "completed"}
        return {"id": self.id, "type": self.type, "role": self.role, "content": parts} | status


class CallItem(Body):
    """A call of a tool that a model has made."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str

    def kept(self) -> dict[str, Any]:
        return self.model_dump() | {"status": "completed"}


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: Content

    def kept(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True) | {"id": self.id, "status": "completed"}


class ReasoningItem(Body):
    """The thoughts of a past answer, for templates that show them to the model. What another server has
    encrypted cannot be read, and is left out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None

    @property
    def words(self) -> str:
        return "\n".join(part.words for part in self.content or self.summary or ())

    def kept(self) -> dict[str, Any]:
        return {"summary": []} | self.model_dump(exclude_none=True) | {"id": self.id}


class ReferenceItem(Body):
    """Stands for an item of a stored answer."""

    type: Literal["item_reference"] | None = None
    id: str


class UnservedItem(UnservedType):
    """An item of another type, such as a call of a tool of the server's own."""

    why = "items of type '{kind}' are not served"
    id: str | None = None


_ITEMS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "CallOutput",
    "reasoning": "Reasoning",
    "item_reference": "Reference",
}


def _kind(item: Any) -> str:
    if isinstance(item, Body):
        return type(item).__name__.removesuffix("Item")
    given = item if isinstance(item, dict) else {}
    unnamed = "message" if "role" in given or "id" not in given else "item_reference"
    kind = given.get("type", unnamed)
    return _ITEMS.get(kind, "Unserved") if isinstance(kind, str) else "Message"


_ITEM_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": [*_ITEMS]}, "id": {"type": "string"}, "role": {"type": "string"}},
}
"""The schema of an item in the document. An error tells what each type needs."""
Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[ReferenceItem, Tag("Reference")]
    | Annotated[UnservedItem, Tag("Unserved")],
    Discriminator(_kind),
    WithJsonSchema(_ITEM_SCHEMA),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns the items as messages of a chat. What a model said without a break, its thoughts, text and
    calls, is one message."""
    said: list[dict[str, Any]] = []
    after_text = False

    def own() -> dict[str, Any]:
        if not said or said[-1]["role"] != "assistant":
            said.append({"role": "assistant", "content": None})
        return said[-1]

    for item in items:
        match item:
            case MessageItem(role="assistant") | ReasoningItem() if after_text:
                said.append({"role": "assistant", "content": None})
        match item:
            case MessageItem(role="assistant"):
                own()["content"] = (own()["content"] or "") + item.words
            case MessageItem():
                said.append({"role": item.role, "content": _chat_content(item.content)})
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                own().setdefault("tool_calls", []).append(call)
            case ReasoningItem(words=thoughts) if thoughts:
                own()["reasoning_content"] = own().get("reasoning_content", "") + thoughts
            case CallOutputItem():
                content = _chat_content(item.output)
                said.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        after_text = isinstance(item, MessageItem) and item.role == "assistant"
    return said


class OwnFunction(Body):
    """A tool of the client's."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class UnservedTool(UnservedType):
    why = "tools of type '{kind}' are not served, only the client's own functions"


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "Function" if kind in ("function", None) else "Unserved"


ResponsesTool = Annotated[
    Annotated[OwnFunction, Tag("Function")] | Annotated[UnservedTool, Tag("Unserved")],
    Discriminator(_tool_kind),
    WithJsonSchema({"$ref": "#/components/schemas/OwnFunction"}),
]


_LEFT_OUT: Final = frozenset(
    {"web_search", "web_search_preview", "tool_search", "namespace", "custom", "local_shell"}
)
"""Tools that coding agents send along to any server."""


def _without_agents_own(tools: Any) -> Any:
    """Returns the tools without those of which the model is not told, because no call of them could come."""
    if not isinstance(tools, list):
        return tools
    return [one for one in tools if not isinstance(one, dict) or one.get("type") not in _LEFT_OUT]


class NamedChoice(Body):
    type: Literal["function"]
    name: ToolName


class NamedSchema(Body):
    type: Literal["json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


_FORMATS = {"text": "Text", "json_object": "JsonObject", "json_schema": "Schema"}


def _format_kind(given: Any) -> str | None:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return _FORMATS.get(kind) if isinstance(kind, str) else None


Format = Annotated[
    Annotated[TextFormat, Tag("Text")]
    | Annotated[JsonObjectFormat, Tag("JsonObject")]
    | Annotated[NamedSchema, Tag("Schema")],
    Discriminator(_format_kind),
]


class TextConfig(Body):
    format: Format | None = None
    verbosity: Verbosity | None = None


class Reasoning(Body):
    """`summary` is accepted: thoughts come whole, and nothing sums them up."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


_NOT_KEPT = "not served; previous_response_id goes on from an answer"
_SAME = ("stream", "temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "parallel_tool_calls")


class ResponsesBody(Body):
    """`top_k`, `seed`, `ignore_eos`, `priority` and `chat_template_kwargs` are a chat's, not OpenAI's own."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=512)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    text: TextConfig | None = None
    tools: (
        Annotated[
            list[ResponsesTool],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            BeforeValidator(_without_agents_own),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    user: str | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    truncation: Annotated[None, Unserved("prompts are not cut short; send a shorter one", "disabled")] = None
    background: Annotated[None, Unserved("answers are made while the client waits", False)] = None
    conversation: Annotated[None, Unserved(_NOT_KEPT)] = None
    prompt: Annotated[None, Unserved("no prompts are kept; send the text in input")] = None
    top_logprobs: Annotated[None, Unserved("served for chats", 0)] = None
    context_management: Annotated[None, Unserved("not served; send a shorter input", [])] = None
    moderation: Annotated[None, Unserved("not served; nothing here moderates")] = None

    @model_validator(mode="after")
    def _says_something(self) -> ResponsesBody:
        if not self.previous_response_id and self.input in (None, []):
            raise wrong("input", "input: a text, or a list of items that is not empty, is needed")
        if LOGPROBS in (self.include or ()):
            raise wrong("include", f"include: {LOGPROBS} is not served; a chat's logprobs are")
        return self

    @property
    def items(self) -> list[Item]:
        """Returns the input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []

    def chat(self, items: Iterable[Item]) -> ChatBody:
        """Returns the same request in the form of a chat. items: all of its conversation, without
        references. Raises ValidationError."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += messages_of(items)
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        fields |= {"model": self.model, "messages": messages}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        fields["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if self.tools or self.tool_choice != "auto":  # which asks for nothing if there are no tools
            choice = self.tool_choice
            fields["tool_choice"] = _chat_choice(choice) if isinstance(choice, NamedChoice) else choice
        if self.text is not None:
            fields["response_format"] = _chat_format(self.text)
            fields["verbosity"] = self.text.verbosity
        return ChatBody.model_validate(fields)


def _chat_tool(tool: Body) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _chat_choice(choice: NamedChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _chat_format(text: TextConfig) -> dict[str, Any] | None:
    if isinstance(text.format, NamedSchema):
        schema = text.format.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}
    return None if text.format is None else text.format.model_dump()


class ResponseUsage(Answer):
    class Input(Answer):
        cached_tokens: int
        cache_write_tokens: int

    class Output(Answer):
        reasoning_tokens: int

    input_tokens: int
    input_tokens_details: Input
    output_tokens: int
    output_tokens_details: Output
    total_tokens: int


class ResponseAnswer(Answer):
    """`output` has items of the types `reasoning`, `message` and `function_call`."""

    class Failure(Answer):
        code: str
        message: str

    class Incomplete(Answer):
        reason: Literal["max_output_tokens"]

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Failure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    user: str | None
    store: bool
    background: Literal[False]
    truncation: Literal["disabled"]


class ResponseEvent(Answer):
    """An event of a stream; each type has fields of its own."""

    type: str
    sequence_number: int


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
