"""Two ranks as threads of one process, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kvloom.exec.parallel.group import RankGroup, connect

T = TypeVar("T")


def both(folder: Path, work: Callable[[RankGroup], T], *, slots: int = 1) -> list[T]:
    """What `work` gives for each of two ranks."""
    store = str(folder / "store")

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        group = connect(store, rank, 2, slots, torch.device("cpu"))
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@dataclass(frozen=True)
class Alone:
    """A team whose other ranks never have to do anything."""

    group: RankGroup

    def meet(self) -> None:
        """They are here."""
