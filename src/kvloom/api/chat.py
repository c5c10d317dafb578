"""/v1/chat/completions: from messages to a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvloom.api.auth import priority
from kvloom.api.bodies import parse
from kvloom.api.catalog import ServedModel
from kvloom.api.chat_writer import ChatWriter
from kvloom.api.gateway import Answering, Gateway
from kvloom.api.generation import Generation
from kvloom.api.metrics import Watch
from kvloom.api.openai.sampling import check_prompt, frame_interval, room_for, sampling_params
from kvloom.api.openai.schemas_chat import ChatBody, ChatMessage, NamedTool
from kvloom.api.openai.tools import Family, forced_guide, marks_of
from kvloom.types.request import Guide, StartGenerate


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    gateway: Gateway

    async def __call__(self, request: Request) -> Response:
        watch = self.gateway.metrics.watch()
        with watch.preparing():
            body = parse(ChatBody, await request.body())
            body.priority = priority(request.scope, body.priority)
            model = await self.gateway.catalog.get(body.model)
            watch.model = model.card.name
            answering = await self._prepare(body, model, watch)
        return await answering.respond(request, stream=bool(body.stream))

    async def _prepare(self, body: ChatBody, model: ServedModel, watch: Watch) -> Answering:
        text = render(body, model)
        prompt = await model.tokenizer.encode(text, special=False)
        check_prompt(prompt, model.card)
        family = parsed_family(body, model)
        request_id = self.gateway.new_id("chatcmpl")
        asked = body.max_completion_tokens or body.max_tokens
        limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        start = StartGenerate(
            model=model.card.name,
            request=request_id,
            prompt=prompt,
            sampling=sampling_params(
                body,
                model,
                max_tokens=room_for(prompt, asked, model.card, "messages", limit),
                draw_seed=self.gateway.draw_seed,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                guide=_forced(body, model, family),
            ),
            n=body.choices,
            priority=body.priority or 0,
            interval=frame_interval(body),
        )
        keep = marks_of(family, model.tokenizer)
        generation = Generation(start, model.tokenizer, body.stops, keep)
        writer = ChatWriter(request_id, int(self.gateway.unix_time()), model, body, family)
        return Answering(self.gateway, writer, [generation], watch)


def render(body: ChatBody, model: ServedModel) -> str:
    offered = body.tools if body.tool_choice != "none" else None
    tools = [tool.model_dump(exclude_none=True) for tool in offered or []] or None
    knows_developer = "developer" in (model.template.text or "")
    messages = [_message(message, knows_developer=knows_developer) for message in body.messages]
    return model.template.render(messages, tools, body.chat_template_kwargs or {})


def _message(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """As templates expect it: content is text, and a past call's arguments are an object."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    if message.role == "developer" and not knows_developer:
        plain["role"] = "system"
    content = message.content
    plain["content"] = (
        "\n".join(part.words for part in content) if isinstance(content, list) else content or ""
    )
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        plain["tool_calls"] = calls
    return plain


def _arguments(text: str) -> Any:
    """What is no JSON is the model's own mistake, and is shown to it as it was."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def parsed_family(body: ChatBody, model: ServedModel) -> Family | None:
    """How calls are looked for in the answer. A forced call in a model of unknown family is plain JSON."""
    if not body.tools or body.tool_choice == "none":
        return None
    return model.family or (Family.LLAMA if body.forces_tool else None)


def _forced(body: ChatBody, model: ServedModel, family: Family | None) -> Guide | None:
    if family is None or not body.forces_tool:
        return None
    only = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = [tool.function for tool in body.tools or [] if only in (None, tool.function.name)]
    tools = [(one.name, one.parameters or {"type": "object"}) for one in functions]
    several = only is None and body.parallel_tool_calls is not False
    return forced_guide(family, tools, model.tokenizer, several=several)
