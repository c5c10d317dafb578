"""What simulated jobs write and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvloom.core.job import Job


class JobFailed(Exception):
    """What a content raises, so does the job."""


class Content(Protocol):
    """What jobs write and read; how long they take is not its matter. `write` and `draw` raise JobFailed
    where the job fails half way."""

    def begin(self, job: Job) -> None:
        """The job has started: its copies of pages are made."""

    def write(self, job: Job, layers: range) -> None:
        """The job has computed K and V of these layers."""

    def draw(self, job: Job, step: int) -> list[int]:
        """The tokens that its samples ask for after this step of it."""


class NoContent:
    """Satisfies `Content`: nothing is written, and each draw gives a number of its own."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self._vocab = vocab

    def begin(self, job: Job) -> None:
        """Pages hold nothing."""

    def write(self, job: Job, layers: range) -> None:
        """Pages hold nothing."""

    def draw(self, job: Job, step: int) -> list[int]:
        size = self._vocab[job.model]
        return [(sample.key + 7919 * (sample.index + step)) % size for sample in job.samples]
