"""The content of pages in virtual time, and the tokens that are drawn of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from kvloom.lab.workload.request import mix
from kvloom.types.job import Job


class JobFailed(Exception):
    """The error of a job that fails; a content raises it."""


class Content(Protocol):
    """The content of pages, which jobs write and read. `write` and `draw` raise JobFailed if the job fails
    half way."""

    def begin(self, job: Job) -> None:
        """Notes that the job has started, and its copies of pages are made."""

    def write(self, job: Job, layers: range) -> None:
        """Notes that the job has computed K and V of these layers."""

    def draw(self, job: Job, step: int) -> list[int]:
        """Returns the tokens that the job's samples ask for after this step of it."""


class NoContent:
    """Satisfies `Content`: nothing is written, and each draw gives a number of its own.

    The text of a model with an acceptance goes round in a circle, but for tokens that are drawn otherwise by
    the sequence's key and their index: as many as drafts are wrong. So n-grams foretell it, and a model that
    drafts, which knows the circle.
    """

    def __init__(self, vocab: Mapping[str, int], acceptance: Mapping[str, float] | None = None) -> None:
        self._vocab = vocab
        self._acceptance = acceptance or {}

    def begin(self, job: Job) -> None:
        """Does nothing, because pages hold nothing."""

    def write(self, job: Job, layers: range) -> None:
        """Does nothing, because pages hold nothing."""

    def draw(self, job: Job, step: int) -> list[int]:
        return [self._token(job.model, sample.key, sample.index + step) for sample in job.samples]

    def draft(self, model: str, key: int, index: int) -> int:
        """Returns the token that stands there in the circle."""
        return (key + 7919 * (index % _CIRCLE)) % self._vocab[model]

    def _token(self, model: str, key: int, index: int) -> int:
        rate, size = self._acceptance.get(model, 0.0), self._vocab[model]
        if not rate:
            return (key + 7919 * index) % size
        drawn = mix(key ^ mix(index))
        other = 1 + drawn % (size - 1) if drawn >= rate * 2**64 else 0
        return (self.draft(model, key, index) + other) % size


_CIRCLE: Final = 16  # tokens
