"""A sandbox contains what its work would do to the process that asked for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from kvloom.serve.processes.sandbox import Limits, Sandbox, grammar_trial
from kvloom.types.errors import BadRequest
from kvloom.types.request import Guide
from tests.api.scripted import card

CHAIN = 5000
POISON = {
    "a chain of references": Guide(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(CHAIN)},
                    f"d{CHAIN}": {"type": "string"},
                },
            }
        ),
    ),
    "a chain of rules": Guide(
        "lark", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(CHAIN)) + f'\nr{CHAIN}: "a"'
    ),
    "a regex of optional characters": Guide("regex", "a?" * 60_000),
    "many properties": Guide(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(20_000)}}),
    ),
}


def play(test: Callable[[Sandbox], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with Sandbox("grammars", 2, Limits(1.0, 512 << 20)) as sandbox:
            await test(sandbox)

    asyncio.run(whole())


@pytest.mark.parametrize("guide", POISON.values(), ids=list(POISON))
def test_a_poisoned_grammar_costs_its_process_alone(guide: Guide) -> None:
    async def test(sandbox: Sandbox) -> None:
        trial = grammar_trial(sandbox)
        with pytest.raises(BadRequest, match="grammar cannot be used: "):
            await trial(card(), guide)
        await trial(card(), Guide("regex", "[ab]+"))  # another process answers

    play(test)
