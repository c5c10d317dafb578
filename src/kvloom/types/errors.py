"""The errors that kvloom tells people and peers, each with a stable code and an HTTP status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import msgspec


def nearest(name: str, known: Sequence[str], likeness: float = 0.5) -> str:
    """Returns a hint at the known name that is most like `name`, or at all of them if none is like it: from
    `likeness` on, of 1."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"did you mean `{close[0]}`?" if close else f"known are {', '.join(known)}"


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form in which an error crosses a verb."""

    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None


class KvloomError(Exception):
    """The base of all errors. `message` is one line that says what was wrong, in what, and what would be
    right."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def to_wire(self) -> WireError:
        return WireError(self.code, self.message, self.param, self.retry_after)

    @staticmethod
    def from_wire(wire: WireError) -> KvloomError:
        kind = _BY_CODE.get(wire.code, KvloomError)
        return kind(wire.message, param=wire.param, retry_after=wire.retry_after)


class ConfigError(KvloomError):
    """A config key, a flag or a checkpoint cannot be used. The command ends with exit code 2."""

    code = "config_error"
    status = 500


class BadRequest(KvloomError):
    """A request makes no sense, whoever would answer it."""

    code = "invalid_request"
    status = 400


class PromptTooLong(BadRequest):
    """A prompt leaves no room in the model's context."""

    code = "context_length_exceeded"


class GuideFailed(BadRequest):
    """A guide has come to a point at which no text can follow, or the next token takes too much work."""

    code = "guide_failed"


class RequestQuarantined(KvloomError):
    """Engines have died of a request, or may have; it is tried at no other."""

    code = "request_quarantined"
    status = 400


class UnknownModel(KvloomError):
    """A request names a model that nobody serves."""

    code = "model_not_found"
    status = 404

    @classmethod
    def named(cls, name: str, served: Iterable[str]) -> Self:
        """Returns the error of a request for a model of this name, in OpenAI's words and with those that are
        served."""
        there = ", ".join(served) or "none"
        told = f"The model `{name[:200]}` does not exist or you do not have access to it; served: {there}"
        return cls(told, param="model")


class Unauthorized(KvloomError):
    """A key is missing or opens nothing."""

    code = "invalid_api_key"
    status = 401


class Conflict(KvloomError):
    """An order contradicts another one that is being carried out."""

    code = "conflict"
    status = 409


class QueueFull(KvloomError):
    """Too many requests wait already."""

    code = "queue_full"
    status = 429


class Unavailable(KvloomError):
    """An engine or a peer cannot be reached, or is about to stop."""

    code = "unavailable"
    status = 503


class HostAway(Unavailable):
    """A connection broke, or was not made, because the engine's host did not answer for long, or the engine
    took nothing. To ask there again at once would take as long once more."""


class ConnectionLost(Unavailable):
    """The connection to an engine broke after the engine was asked. It may have died of what it was asked."""


class EngineDied(Unavailable):
    """The engine has died since it was asked, and nobody had ordered that."""


class OutOfBlocks(KvloomError):
    """The pool has fewer free blocks than were asked for. Nothing was taken."""

    code = "out_of_blocks"
    status = 503


_BY_CODE: dict[str, type[KvloomError]] = {
    kind.code: kind
    for kind in (
        ConfigError,
        BadRequest,
        PromptTooLong,
        GuideFailed,
        RequestQuarantined,
        UnknownModel,
        Unauthorized,
        Conflict,
        QueueFull,
        Unavailable,
        OutOfBlocks,
    )
}
