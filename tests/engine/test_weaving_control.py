"""When a cold unit looks for tasks, and how small it cuts its operators, changes no token of either."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvloom.types.errors import BadRequest
from kvloom.types.load import Waits
from tests.checkpoints import make_checkpoint
from tests.engine.test_weaving import check, generate, pair, prompts
from tests.engines import ask, body
from tests.weaving import MODEL, PAGES, woven_of

COUNT = 20


@pytest.mark.parametrize(
    ("family", "terms"),
    [
        ("llama", {"control": "iterations", "split": "none"}),
        ("qwen3", {"split": "none"}),
        ("mistral", {"waits": 0.001}),
        ("gemma2", {"waits": 0.001}),
    ],
)
def test_tokens_of_both_are_their_own(family: str, terms: dict[str, Any], tmp_path: Path) -> None:
    """The family is the cold unit's, which polls."""
    hot_path = make_checkpoint(tmp_path / "hot", "qwen2")
    cold_path = make_checkpoint(tmp_path / "cold", family)
    asked = prompts(8, len(family))

    async def serve() -> tuple[list[Any], list[Any], Waits | None]:
        async with pair((hot_path, cold_path)) as (hot, cold):
            wanted = replace(hot.borrower.terms(MODEL, PAGES), **terms)
            hot.borrower.borrow(wanted, cold.lender.lend(wanted), 0.6)
            own = asyncio.gather(*(ask(cold, body("cold", p, max_tokens=COUNT)) for p in asked))
            answers, others = await asyncio.gather(generate(hot, asked), own)
            assert woven_of(hot).tokens > COUNT
            return answers, others, (await cold.load()).waits

    answers, others, waits = asyncio.run(serve())
    check(hot_path, asked, answers)
    check(cold_path, asked, others)
    assert waits is not None
    assert waits.tasks_total >= COUNT
    assert waits.wait > 0
    assert waits.service > 0
    assert (waits.parts == 1) == (terms.get("control") == "iterations")  # a forward is one operator


def test_nothing_is_told_of_waits_where_nothing_is_lent(tmp_path: Path) -> None:
    paths = make_checkpoint(tmp_path / "hot", "qwen2"), make_checkpoint(tmp_path / "cold", "llama")

    async def serve() -> None:
        async with pair(paths) as (hot, cold):
            assert (await cold.load()).waits is None
            terms = hot.borrower.terms(MODEL, 4)
            with pytest.raises(BadRequest):
                cold.lender.lend(replace(terms, heads=terms.heads + 1))
            cold.lender.lend(terms)
            waits = (await cold.load()).waits
            assert waits is not None
            assert waits.tasks_total == 0

    asyncio.run(serve())
