"""The traffic log: parts add up whoever wrote them, lengths can be had back, and damage costs one line."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.journal import traffic_log
from kvloom.journal.traffic import (
    HOUR,
    TrafficCounts,
    TrafficHour,
    add_up,
    bucket,
    decode_hours,
    encode_hours,
    nearest_rank,
    quantile,
    rebuild,
)
from kvloom.journal.traffic_log import KEPT_HOURS, TrafficKeeper, TrafficLog

BEGIN = 490_000 * HOUR
NOW = float(BEGIN + HOUR)


def one(hour: int = BEGIN, model: str = "chat", **more: Any) -> TrafficHour:
    return TrafficHour(hour=hour, model=model, requests=1, minutes={0: 1}, **more)


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=60))
def test_lengths_are_had_back_with_their_mean_and_within_a_factor_of_two(lengths: list[int]) -> None:
    histogram: dict[int, int] = {}
    for length in lengths:
        histogram[bucket(length)] = histogram.get(bucket(length), 0) + 1
    found = rebuild(histogram, sum(lengths))
    assert sum(count for _, count in found) == len(lengths)
    assert sum(length * count for length, count in found) == pytest.approx(sum(lengths))
    ranked = sorted(lengths)
    for q in (0.0, 0.5, 0.95, 1.0):
        true, value = ranked[nearest_rank(q, len(ranked)) - 1], quantile(found, q)
        assert true / 2 <= value <= 2 * true
        assert bucket(int(value + 1e-6)) == bucket(true)


def test_a_high_quantile_of_few_lengths_is_the_largest() -> None:
    assert [quantile([(11.0, 1), (318.0, 1)], q) for q in (0.0, 0.5, 0.51, 0.95, 1.0)] == [
        11,
        11,
        318,
        318,
        318,
    ]
    assert quantile([(1.0, 1), (2.0, 1), (3.0, 1)], 0.99) == 3
    assert quantile([], 0.95) == 0


@pytest.mark.parametrize(
    ("q", "count", "rank"),
    [(0.0, 9, 1), (0.5, 3, 2), (0.95, 20, 19), (0.99, 99, 99), (0.99, 100, 99), (0.07, 100, 7), (1.0, 9, 9)],
)
def test_the_nearest_rank(q: float, count: int, rank: int) -> None:
    assert nearest_rank(q, count) == rank


_parts = st.builds(
    lambda hour, model, requests, minute: TrafficHour(
        hour=BEGIN + hour * HOUR,
        model=model,
        requests=requests,
        prompts={bucket(requests): requests},
        minutes={minute: requests},
    ),
    st.integers(0, 2),
    st.sampled_from("ab"),
    st.integers(1, 9),
    st.integers(0, 59),
)


@given(st.lists(_parts, max_size=20), st.data())
def test_parts_add_up_in_any_order_and_grouping(parts: list[TrafficHour], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(0, len(parts)))
    assert add_up(parts) == add_up([*add_up(shuffled[:cut]), *add_up(shuffled[cut:])])
    assert decode_hours(encode_hours(parts)) == (parts, 0)
    assert sum(hour.requests for hour in add_up(parts)) == sum(part.requests for part in parts)


def test_what_a_request_counts_for() -> None:
    counts = TrafficCounts()
    counts.answered("chat", BEGIN + 125.0, 1, 100, 7, 64)
    counts.answered("chat", BEGIN + 179.9, 4, 40, 16, 0)  # four prompts in one request
    counts.answered("chat", BEGIN + 60.0, 0, 0, 0, 0)
    counts.unanswered("chat", BEGIN + 3599.0)
    counts.answered("tuned", BEGIN + HOUR, 1, 3, 0, 0, base="chat")
    chat, tuned = counts.take()
    assert (chat.hour, chat.requests, chat.unanswered, chat.asked) == (BEGIN, 5, 1, 6)
    assert (chat.prompt_tokens, chat.output_tokens, chat.cached_tokens) == (140, 23, 64)
    assert (chat.prompts, chat.outputs) == ({4: 4, 7: 1}, {3: 5})
    assert (chat.minutes, chat.peak) == ({2: 5, 59: 1}, 5)
    assert (tuned.hour, tuned.model, tuned.base) == (BEGIN + HOUR, "tuned", "chat")
    assert counts.take() == []


def test_bursts_have_more_burstiness_than_a_steady_stream() -> None:
    def hour(minutes: dict[int, int]) -> TrafficHour:
        return TrafficHour(hour=BEGIN, model="m", minutes=minutes)

    assert hour(dict.fromkeys(range(60), 4)).burstiness == 0.0
    assert hour({0: 10, 9: 10}).burstiness == pytest.approx(8.0)  # mean 2, variance 16
    assert hour({}).burstiness == 0.0


def test_damaged_lines_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traffic.jsonl"
    log = TrafficLog(path)
    assert log.read() == []
    log.add([one()], NOW)
    with path.open("ab") as file:
        file.write(b'{"kvloom_traffic":1,"hour":17,"model":"chat"}\n\xff\n{"kvloom_traffic":1,"hour":')
    log.add([one()], NOW)  # begins a line of its own, though somebody died in the last one
    (found,) = log.read()
    assert found.requests == 2
    assert "3 damaged lines" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_is_made_anew_without_what_is_old_or_too_much(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    old = BEGIN - (KEPT_HOURS + 1) * HOUR
    TrafficLog(path).add([one(old), *[one()] * 100], NOW)  # the first writing makes it anew
    assert path.read_bytes().count(b"\n") == 1
    hours = [one(BEGIN - n * HOUR) for n in range(50)]
    size = len(encode_hours(hours[:1]))
    TrafficLog(path, most=10 * size + 50).add(hours, NOW)
    assert [hour.hour for hour in TrafficLog(path).read()] == [BEGIN - n * HOUR for n in range(9, -1, -1)]


def _write(path: Path, times: int) -> None:
    log = TrafficLog(path)
    for n in range(times):
        log.add([one()], NOW)
        if n % 10 == 0:
            log = TrafficLog(path)  # makes the file anew


def test_several_processes_write_and_make_it_anew_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, 50)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    (found,) = TrafficLog(path).read()
    assert found.requests == 150


def test_what_cannot_be_written_is_kept_for_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traffic.jsonl"
    path.mkdir()
    counts, now = TrafficCounts(), int(time.time()) // HOUR * HOUR
    counts.put(one(now))
    keeper = TrafficKeeper(counts, TrafficLog(path))
    asyncio.run(keeper.write())
    assert "the traffic log cannot be written: Is a directory" in caplog.text
    path.rmdir()
    counts.put(one(now))
    assert [hour.requests for hour in asyncio.run(keeper.everywhere())] == [2]


def test_a_file_that_cannot_be_made_anew_has_what_was_appended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk may have room for a line, and none for the whole file."""

    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(traffic_log, "replacing", full)
    counts, log = TrafficCounts(), TrafficLog(tmp_path / "traffic.jsonl")
    counts.put(one())
    keeper = TrafficKeeper(counts, log)
    for _ in range(3):
        asyncio.run(keeper.write())
    assert [hour.requests for hour in log.read()] == [1]
    assert "the traffic log cannot be made anew: No space left on device" in caplog.text
