"""A model's own chat template, which is a program of a stranger's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.types.errors import BadRequest
from kvloom.types.request import ModelCard

MAX_RENDERED: Final = 16 << 20  # characters, after which a template is stopped
MAX_STEPS: Final = 250_000  # rounds of loops and calls of macros, after which a template is stopped

# A template that is wrong, or is given what it does not expect, may raise these beside jinja2's own errors.
_BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class _Generation(Extension):
    """Reads {% generation %}, which marks the assistant's words for training, as its body."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Steps(Extension):
    """Counts the rounds of loops and the calls of macros: each begins with a call of `take`."""

    left = MAX_STEPS

    def take(self) -> str:
        self.left -= 1
        if self.left < 0:
            raise TemplateError(f"it takes more than {MAX_STEPS} rounds of its loops and macros")
        return ""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox in which templates run. What they import, call and change is bounded by jinja2, their steps
    by `_Steps`; memory and what single filters take are left to the process's limits."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        found: Iterator[Any] = parsed.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in found:
            taken = nodes.ExtensionAttribute(_Steps.identifier, "take", lineno=node.lineno)
            call = nodes.Call(taken, [], [], None, None, lineno=node.lineno)
            step = nodes.ExprStmt(call, lineno=node.lineno)
            step.set_environment(self)
            node.body.insert(0, step)
        return parsed


class _Arguments(dict[str, Any]):
    """The arguments of a past call: an object, which some templates (DeepSeek's) add to text as JSON."""

    def __radd__(self, before: str) -> str:
        return before + json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return json.dumps(self, ensure_ascii=False) + after


def _given(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message as templates are given it."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    given = [
        one | {"arguments": _Arguments(one["arguments"])} if isinstance(one["arguments"], dict) else one
        for one in functions
    ]
    called = [call | {"function": one} for call, one in zip(calls, given, strict=True)]
    return message | {"tool_calls": called}


class ChatTemplate:
    """Renders a model's own chat template as transformers does, in a sandbox.

    The template is compiled on first use. If it does not compile, each request is answered with 400.
    """

    def __init__(self, card: ModelCard) -> None:
        self.text = card.chat_template
        self._name = card.name
        self._special = dict(card.special_tokens)
        self._environment = _environment()
        self._steps = cast(_Steps, self._environment.extensions[_Steps.identifier])
        self._compiled: Template | None = None

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        """Returns the prompt. Raises BadRequest if there is no template or if it fails.

        `options` are the template's own switches, which cannot replace messages, tools or tokens.
        """
        if self.text is None:
            raise BadRequest(
                f"model {self._name} has no chat template: use /v1/completions", param="messages"
            )
        given = {"add_generation_prompt": True} | options | self._special
        given |= {"messages": [_given(message) for message in messages], "tools": tools}
        try:
            pieces, size = [], 0
            self._steps.left = MAX_STEPS
            self._compiled = self._compiled or self._environment.from_string(self.text)
            for piece in self._compiled.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise BadRequest("the chat template wrote too long a text", param="messages")
        except TemplateError as error:
            raise BadRequest(f"chat template of {self._name}: {error}", param="messages") from None
        except _BROKEN as error:
            kind = type(error).__name__
            raise BadRequest(f"chat template of {self._name}: {kind}: {error}", param="messages") from None
        return "".join(pieces)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Steps, loopcontrols]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
