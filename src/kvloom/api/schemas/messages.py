"""The forms of requests and answers of /v1/messages, and what a request is as a chat of OpenAI's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, WithJsonSchema, model_validator
from pydantic.types import Discriminator
from pydantic_core import PydanticCustomError

from kvloom.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatBody, ToolName, UnservedType
from kvloom.api.schemas.generation import Answer, Body, StopList, Unserved


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class UnservedBlock(UnservedType):
    """A block of another type, such as an image."""

    why = "blocks of type '{kind}' are not served, only text and tools"


def _result_kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "text" if kind == "text" else "other"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[UnservedBlock, Tag("other")],
    Discriminator(_result_kind),
    WithJsonSchema({"$ref": "#/components/schemas/TextBlock"}),
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """Holds a model's earlier thoughts, for templates that show them to it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return "thinking" if kind == "redacted_thinking" else kind if kind in _KINDS else "other"


_BLOCK_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]},
        "text": {"type": "string"},
    },
}
"""The schema of a block in the document. An error tells what each type needs."""
_KINDS = ("text", "tool_use", "tool_result", "thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[UnservedBlock, Tag("other")],
    Discriminator(_kind),
    WithJsonSchema(_BLOCK_SCHEMA),
]


class Turn(Body):
    """`system` is an instruction in the middle of a conversation, which coding agents give. Most templates
    have no place for one, so that it becomes a part of the user's turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]

    def messages(self) -> list[dict[str, Any]]:
        """Returns the turn as messages of a chat, in the order of its blocks: each result of a tool is one of
        its own. Anthropic wants results first; a text before one comes before it here, too."""
        role = "assistant" if self.role == "assistant" else "user"
        if isinstance(self.content, str):
            return [{"role": role, "content": [{"type": "text", "text": self.content}]}]
        said: list[dict[str, Any]] = []
        blocks: list[TextBlock | ToolUseBlock | ThinkingBlock] = []
        for block in self.content:
            match block:
                case ToolResultBlock(tool_use_id=call):
                    said += _message(role, blocks)
                    said.append({"role": "tool", "tool_call_id": call, "content": _result(block)})
                    blocks = []
                case TextBlock() | ToolUseBlock() | ThinkingBlock():
                    blocks.append(block)
        said += _message(role, blocks)
        return said if self.content else [{"role": role, "content": None if role == "assistant" else []}]


def _message(role: str, blocks: list[TextBlock | ToolUseBlock | ThinkingBlock]) -> list[dict[str, Any]]:
    """Returns the blocks as one message; none if they say nothing."""
    text: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                text.append({"type": "text", "text": block.text})
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock(thinking=thought) if thought and role == "assistant":
                thoughts.append(thought)
    if not (text or calls or thoughts):
        return []
    message = {"role": role, "content": text or None if role == "assistant" else text}
    message |= {"tool_calls": calls} if calls else {}
    return [message | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})]


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = (
        content
        if isinstance(content, str)
        else "\n".join(part.text for part in content if isinstance(part, TextBlock))
    )
    return f"Error: {text}" if block.is_error else text


class OwnTool(Body):
    """A tool of the client's."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Annotated[None, Unserved("tools of the server's own are not served", "custom")] = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("choice", "a tool's name is right with type 'tool', and with no other")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


_NO_FORMAT = "not served here; response_format of /v1/chat/completions is"


class OutputConfig(Body):
    """`effort` is given to the template as `reasoning_effort`."""

    effort: str | None = None
    format: Annotated[None, Unserved(_NO_FORMAT)] = None


class PromptBody(Body):
    """The part of a request from which its prompt is made."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Annotated[None, Unserved("not served; a client can call such servers", [])] = None
    output_format: Annotated[None, Unserved(_NO_FORMAT)] = None
    output_config: OutputConfig | None = None
    container: Annotated[None, Unserved("no code is run")] = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> PromptBody:
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "field:messages", "messages: an answer begins after the user's last message; end with one"
            )
        return self

    def chat(self, **more: Any) -> ChatBody:
        """Returns the same request in OpenAI's form. more: further fields. Raises ValidationError."""
        system = self.system or ""
        text = system if isinstance(system, str) else "\n".join(part.text for part in system)
        messages = [{"role": "system", "content": text}] if text else []
        for message in (message for turn in self.messages for message in turn.messages()):
            if messages and message["role"] == messages[-1]["role"] == "user":
                messages[-1]["content"] += message["content"]  # Anthropic joins turns of the user, too
            else:
                messages.append(message)
        fields: dict[str, Any] = {"model": self.model, "messages": messages} | more
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        effort = self.output_config.effort if self.output_config else None
        switches = {"enable_thinking": thinks} | ({"reasoning_effort": effort} if effort else {})
        fields["chat_template_kwargs"] = switches
        return ChatBody.model_validate(fields)


def _function(tool: OwnTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _choice(choice: ToolChoice) -> Any:
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class CountBody(PromptBody):
    """The body of /v1/messages/count_tokens."""


class MessagesBody(PromptBody):
    """`top_k`, `temperature` and `top_p` are the model's own if they are left out. `max_tokens` may be more
    than the context has room for, since it cannot be left out."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: StopList | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    def chat(self, **more: Any) -> ChatBody:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        own = {name: getattr(self, name) for name in names}
        return super().chat(stop=self.stop_sequences or None, **own, **more)


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TokenCount(Answer):
    input_tokens: int


class TextContent(Answer):
    type: Literal["text"]
    text: str


class ToolUseContent(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class ThinkingContent(Answer):
    """The model's thoughts. Nothing is signed here, so that the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class Message(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """An event of a stream; each type has fields of its own."""

    type: str


class MessagesError(Answer):
    class Told(Answer):
        type: str
        message: str

    type: Literal["error"]
    error: Told
