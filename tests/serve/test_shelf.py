"""What is kept of units without a process."""

from __future__ import annotations

from pathlib import Path

from kvloom.serve.shelf import Shelf
from tests.router.ledger import card


def test_the_last_cards_are_kept(tmp_path: Path) -> None:
    cards = [card("m", tokenizer="x" * 100_000), card("other", chat_template="{}")]
    shelf = Shelf(tmp_path)
    assert shelf.cards("unit-0") == []
    shelf.keep("unit-0", [card("before")])
    shelf.keep("unit-0", cards)
    assert Shelf(tmp_path).cards("unit-0") == cards
    assert shelf.cards("unit-1") == []
    assert [file.name for file in tmp_path.iterdir()] == ["unit-0.cards"]
