"""What units serve that have no process now, kept for a gateway's successor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kvloom.types.request import ModelCard


class Shelf:
    """A file for each unit in the fleet's own folder, which ends with the fleet: a card holds a tokenizer,
    too much for a pipe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, unit: str, cards: Sequence[ModelCard]) -> None:
        made = self._file(unit).with_suffix(".new")
        made.write_bytes(msgspec.msgpack.encode(cards))
        made.replace(self._file(unit))

    def cards(self, unit: str) -> list[ModelCard]:
        """No card where it has never served."""
        with suppress(FileNotFoundError):
            return msgspec.msgpack.decode(self._file(unit).read_bytes(), type=list[ModelCard])
        return []

    def _file(self, unit: str) -> Path:
        return self._folder / f"{unit}.cards"
