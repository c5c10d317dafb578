"""Turns a chat, of whichever API, into a prompt, a grammar, and a reader of the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from kvloom.api.answers.call_formats import ToolCallFormat, fit_ids
from kvloom.api.answers.forced import forced_guide
from kvloom.api.answers.reader import AnswerFormat, AnswerReader, Tools
from kvloom.api.catalog import ServedModel
from kvloom.api.generation.pieces import Generation
from kvloom.api.generation.resume import Origin
from kvloom.api.generation.sampling import check_prompt, room_for, sampling_params, start_of
from kvloom.api.schemas.chat import ChatBody, ChatMessage, NamedTool, Tool
from kvloom.api.schemas.closing import closed
from kvloom.api.texts.prompts import UNRENDERED, ChatPrompt, content_bytes
from kvloom.types.errors import BadRequest
from kvloom.types.request import Guide, wrong_task


class Readers(Protocol):
    """Makes what reads a choice of an answer."""

    def __call__(self, *, whole_calls: bool = False) -> AnswerReader: ...


async def chat_generation(
    body: ChatBody, model: ServedModel, tenant: str, origin: Origin, prefix: str, *, capped: bool = False
) -> tuple[Generation, Readers]:
    """Returns what a chat asks of an engine, and what reads its answer. prefix: of the answer's id; capped:
    whether a limit above the context's room is lowered to it, and not refused. Raises KvloomError."""
    if model.card.task != "generate":
        raise wrong_task(model.card, "generate")
    given = prompt_of(model, body.messages, offered(body), switches(body, model))
    prompt = await model.tokens(given, tenant)
    check_prompt(prompt, model.card)
    asked = body.max_completion_tokens or body.max_tokens
    if capped and asked is not None:
        asked = min(asked, max(1, model.card.context_length - len(prompt)))
    limit = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    answer_format = _answer_format(body, model)
    guide = _forced(body, model, answer_format.tool_calls)
    sampling = sampling_params(
        body,
        model,
        max_tokens=room_for(prompt, asked, model.card, "messages", limit),
        drawn=origin.seed_of(0),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=guide,
    )
    start = start_of(body, origin.request_id(prefix), prompt, sampling)
    thinks = sampling.guide is None  # a grammar holds from the answer's first token on
    readers = partial(
        answer_format.reader,
        _parameters(body),
        thinks=thinks,
        opened=thinks and answer_format.opened(prompt, model.tokenizer),
    )
    keep = answer_format.marks(model.tokenizer, calls=bool(offered(body)), thinks=thinks)
    return Generation(start, model.tokenizer, body.stops, keep), readers


def switches(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """Returns the template's own switches. Raises BadRequest if thoughts are asked for that it lacks."""
    effort = body.reasoning_effort
    options: dict[str, Any] = {} if body.verbosity is None else {"verbosity": body.verbosity}
    if effort is not None:
        if effort != "none" and not model.answer_format.thinks:
            said = "reasoning_effort: the chat template of this model has no thoughts; leave it out, or none"
            raise BadRequest(said, param="reasoning_effort")
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return options | (body.chat_template_kwargs or {})


def _answer_format(body: ChatBody, model: ServedModel) -> AnswerFormat:
    """Returns how the answer is written. A forced call in a model of unknown family is plain JSON."""
    forced = body.forces_tool and model.answer_format.tool_calls is None
    return replace(model.answer_format, tool_calls=ToolCallFormat.LLAMA) if forced else model.answer_format


def _parameters(body: ChatBody) -> Tools | None:
    """Returns the schemas of the offered tools' parameters, by name; None if there are no tools."""
    functions = [tool.function for tool in offered(body)]
    return {one.name: one.parameters or {} for one in functions} or None


def offered(body: ChatBody) -> list[Tool]:
    """Returns the tools of which the model is told."""
    return body.tools or [] if body.tool_choice != "none" else []


def prompt_of(
    model: ServedModel,
    messages: list[ChatMessage],
    tools: list[Tool],
    options: dict[str, Any],
    *,
    bounded: bool = True,
) -> ChatPrompt:
    """Returns what the model's chat template is given. options: the template's own switches; bounded: whether
    it is to fit the model's context. Raises PromptTooLong."""
    offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
    knows_developer = "developer" in (model.template.text or "")
    said = [_message(message, knows_developer=knows_developer) for message in messages]
    fit_ids(model.answer_format.tool_calls, said)
    if bounded:
        model.check_size(content_bytes(said), UNRENDERED, "messages")
    return ChatPrompt.of(said, offered, options, bounded=bounded)


def _message(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """Returns the message as templates expect it: content is text, and a past call's arguments are an
    object."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "refusal", "tool_calls"})
    if message.role == "developer" and not knows_developer:
        plain["role"] = "system"
    content = message.content
    said = "\n".join(part.words for part in content) if isinstance(content, list) else content
    plain["content"] = said or message.refusal or ""
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        plain["tool_calls"] = calls
    return plain


def _arguments(text: str) -> Any:
    """Returns the arguments as an object. What is no JSON is the model's own mistake, and stays as it was."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _forced(body: ChatBody, model: ServedModel, call_format: ToolCallFormat | None) -> Guide | None:
    """Returns the grammar of the calls that a request forces; None if it forces none."""
    if call_format is None or not body.forces_tool:
        return None
    only = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = [tool.function for tool in body.tools or [] if only in (None, tool.function.name)]
    tools = [
        (one.name, closed(one.parameters or {"type": "object"}, strict=bool(one.strict))) for one in functions
    ]
    several = only is None and body.parallel_tool_calls is not False
    return forced_guide(call_format, tools, model.tokenizer, several=several)
