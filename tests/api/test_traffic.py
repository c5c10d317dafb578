"""What of a gateway's requests counts as traffic."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.api.errors import RateLimited
from kvloom.api.metrics import Metrics, Watch
from kvloom.journal.lives import Tokens
from kvloom.types.errors import BadRequest, KvloomError, OutOfBlocks, QueueFull, Unavailable

NONE = Tokens()


def watched(metrics: Metrics, tokens: Tokens = NONE) -> Watch:
    watch = metrics.watch()
    watch.model, watch.base = "tuned", "chat"
    watch.life.tokens_by(lambda: tokens)
    return watch


def counted(metrics: Metrics) -> list[tuple[int, int, int, int]]:
    return [
        (one.requests, one.unanswered, one.prompt_tokens, one.cached_tokens) for one in metrics.traffic.take()
    ]


def test_an_answer_counts_and_what_a_caller_left() -> None:
    metrics = Metrics()
    with watched(metrics, Tokens(8, 3, 4)).answering(lambda: (8, 3)):
        pass
    with (
        pytest.raises(asyncio.CancelledError),
        watched(metrics, Tokens(8, 1, 0)).answering(lambda: (8, 1)),
    ):
        raise asyncio.CancelledError
    with pytest.raises(asyncio.CancelledError), watched(metrics).preparing():
        raise asyncio.CancelledError  # nobody knows yet how long it was
    assert counted(metrics) == [(2, 0, 16, 4)]


@pytest.mark.parametrize(
    ("error", "is_demand"),
    [
        (QueueFull("full"), True),
        (Unavailable("no engine"), True),
        (OutOfBlocks("none"), True),
        (RateLimited("this key has had enough"), False),
        (BadRequest("no prompt"), False),
    ],
)
def test_an_error_counts_if_it_is_for_want_of_room_or_the_fleets_fault(
    error: KvloomError, is_demand: bool
) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), watched(metrics).preparing():
        raise error
    with pytest.raises(type(error)), watched(metrics, Tokens(8, 3, 0)).answering(lambda: (8, 3)):
        raise error
    assert counted(metrics) == ([(0, 2, 0, 0)] if is_demand else [])


def test_an_adapter_is_told_with_its_base() -> None:
    metrics = Metrics()
    with watched(metrics, Tokens(1, 1, 0)).answering(lambda: (1, 1)):
        pass
    assert [(one.model, one.base) for one in metrics.traffic.take()] == [("tuned", "chat")]


def test_a_request_for_no_model_that_is_known_does_not_count() -> None:
    metrics = Metrics()
    with pytest.raises(Unavailable), metrics.watch().preparing():
        raise Unavailable("nobody is there")
    assert counted(metrics) == []
