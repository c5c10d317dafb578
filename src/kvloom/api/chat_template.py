"""Renders a model's own chat template as transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvloom.types.errors import BadRequest
from kvloom.types.request import ModelCard

MAX_RENDERED = 16 << 20  # characters; a template that writes more is stopped


# What a template that is wrong, or was given what it does not expect, may raise beside jinja2's own.
_BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled on first use; a template that does not compile is each request's 400, not the server's end."""

    def __init__(self, card: ModelCard, now: Callable[[], datetime] = datetime.now) -> None:
        self.text = card.chat_template
        self._name = card.name
        self._special = dict(card.special_tokens)
        self._environment = _environment(now)
        self._compiled: Template | None = None

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        """`options` are the template's own switches; they cannot replace messages, tools or tokens."""
        if self.text is None:
            raise BadRequest(
                f"model {self._name} has no chat template: use /v1/completions", param="messages"
            )
        given = {"add_generation_prompt": True} | options | self._special
        given |= {"messages": messages, "tools": tools}
        try:
            pieces, size = [], 0
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


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
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
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment
