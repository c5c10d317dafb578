"""Samples of a fleet: their numbers are those of /metrics, they are made once for all who listen, and what is
kept of them is bounded."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from kvloom.api.live.samples import LiveSamples, SampleStream
from kvloom.api.live.totals import model_totals
from kvloom.api.metrics import Metrics
from kvloom.journal.samples import Sample, SampleHistory, encode_sample, make_sample
from kvloom.types.errors import BadRequest
from kvloom.types.load import ModelLoad, UnitLoad, Waits, WeightLoad
from kvloom.types.service import Service
from tests.modelled import turns
from tests.modelled_units import ManualClock

MODEL = ModelLoad(
    waiting=3,
    running=2,
    used_blocks=40,
    cached_blocks=7,
    pinned_blocks=5,
    quota_blocks=60,
    begun_blocks=0,
    head_blocks=0,
    waiting_blocks=0,
    page_blocks=1,
    page_tokens=16,
    prompt_tokens_total=1000,
    cached_tokens_total=120,
    received_tokens_total=0,
    output_tokens_total=345,
    preemptions_total=6,
    prefill_jobs_total=9,
    decode_jobs_total=10,
    away=1,
    oldest_wait=0.75,
    weights=WeightLoad(awake=False, blocks=11, wakes_total=1, wake_seconds=0.5),
)
WAITS = Waits(
    tasks_total=1,
    ahead=0.1,
    parts=2,
    service=0.1,
    wait=0.2,
    beyond=0.3,
    stall=0.4,
    expected_wait=0.5,
    expected_beyond=0.6,
    expected_stall=0.7,
)
LOAD = UnitLoad(
    total_blocks=100,
    free_blocks=33,
    block_bytes=4096,
    policy="adbs",
    models={"chat": MODEL, "code": replace(MODEL, weights=None, waiting=0)},
    lent_blocks=9,
    waits=WAITS,
)
LOADS = {"unit-0": LOAD}
SERVICES: dict[str, Service] = {"unit-0": "up", "unit-1": "down"}
GAUGES = {
    "waiting": "kvloom_requests_waiting",
    "oldest": "kvloom_requests_waiting_oldest_seconds",
    "running": "kvloom_requests_running",
    "used": "kvloom_kv_blocks_used",
    "cached": "kvloom_kv_blocks_cached",
    "pinned": "kvloom_pinned_blocks",
    "quota": "kvloom_kv_blocks_quota",
    "weights": "kvloom_weights_blocks",
    "awake": "kvloom_weights_awake",
    "away": "kvloom_away_sequences",
    "prompt_tokens": "kvloom_prompt_tokens_total",
    "cached_tokens": "kvloom_cached_tokens_total",
    "output_tokens": "kvloom_output_tokens_total",
    "preemptions": "kvloom_preemptions_total",
}
POOL = {
    "blocks": "kvloom_kv_blocks",
    "free": "kvloom_kv_blocks_free",
    "lent": "kvloom_kv_blocks_lent",
    "block_bytes": "kvloom_kv_block_bytes",
}
TOTALS = {
    "ttft_sum": "kvloom_time_to_first_token_seconds_sum",
    "ttft_count": "kvloom_time_to_first_token_seconds_count",
    "tpot_sum": "kvloom_time_per_output_token_seconds_sum",
    "tpot_count": "kvloom_time_per_output_token_seconds_count",
}


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Each value of /metrics, by its name and the values of its labels."""
    text = metrics.render(LOADS, SERVICES, {}, {}).decode()
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            values[one.name, *(label for _, label in sorted(one.labels.items()))] = one.value
    return values


def streamed(metrics: Metrics, model: str) -> None:
    watch = metrics.watch()
    watch.model = model
    with watch.answering(lambda: (7, 5)):
        watch.made_tokens()


def test_a_sample_has_the_numbers_of_metrics() -> None:
    metrics = Metrics()
    for model in ("chat", "chat", "code"):
        streamed(metrics, model)
    with suppress(BadRequest), metrics.watch().preparing():  # of no model that is served
        raise BadRequest("no JSON")
    sample = make_sample(1.0, LOADS, SERVICES, model_totals(metrics), borrowers={"unit-0": "unit-1"})
    told, there = json.loads(encode_sample(sample)), scraped(metrics)
    unit, silent = told["units"]
    assert {field: unit[field] for field in POOL} == {
        field: there[name, "unit-0"] for field, name in POOL.items()
    }
    assert unit["waves"] == [
        {
            "peer": "unit-1",
            "wait_seconds": there["kvloom_weave_wait_seconds", "measured", "unit-0", "wait"],
        }
    ]
    for model in unit["models"]:
        wanted = {field: there[name, model["model"], "unit-0"] for field, name in GAUGES.items()}
        assert {field: model[field] for field in GAUGES} == wanted
    assert [unit["state"], silent["state"]] == ["up", "down"]
    assert (silent["models"], "waves" in silent) == ([], False)
    for model in told["models"]:
        name = model["model"]
        assert model["requests"] == there["kvloom_requests_total", name, "200"]
        assert {field: model[field] for field in TOTALS} == {
            field: there[series, name] for field, series in TOTALS.items()
        }
    assert [one["model"] for one in told["models"]] == ["chat", "code"]


class Listener:
    """It reads as long as it is let, and never hangs up."""

    def __init__(self, samples: LiveSamples, last: str = "") -> None:
        self.said: list[bytes] = []
        self.over = False
        self._news = asyncio.Event()
        self._stream = SampleStream(samples, last)

    async def read(self) -> None:
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/admin/live", "headers": []}
        await self._stream(scope, self._receive, self._send)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Each one's kind and data."""
        whole = [one for one in b"".join(self.said).split(b"\n\n") if one]
        fields = [dict(line.split(b": ", 1) for line in one.split(b"\n")) for one in whole]
        return [(one[b"event"].decode(), json.loads(one[b"data"])) for one in fields]

    async def until(self, count: int) -> None:
        """Waits for so many events."""
        while b"".join(self.said).count(b"\n\n") < count:
            self._news.clear()
            await self._news.wait()

    async def _receive(self) -> Message:
        hung_up: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await hung_up

    async def _send(self, message: Message) -> None:
        self.said.append(message.get("body", b""))
        self.over = message["type"] == "http.response.body" and not message["more_body"]
        self._news.set()


class Ticking(ManualClock):
    """Whoever sleeps wakes with the next `tick` that reaches its time."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.time + seconds, woken))
        await woken.wait()

    async def tick(self, seconds: float = 1.0) -> None:
        self.time += seconds
        due = [one for one in self._sleepers if one[0] <= self.time]
        self._sleepers = [one for one in self._sleepers if one not in due]
        for _, woken in due:
            woken.set()
        await turns()


class Asked:
    """A fleet of many units, how often it was asked, and what was encoded."""

    def __init__(self, clock: Ticking, units: int = 1) -> None:
        self.asked = 0
        self.encoded: list[bytes] = []
        self._clock = clock
        self._loads = {f"unit-{number}": LOAD for number in range(units)}

    async def take(self) -> Sample:
        self.asked += 1
        return make_sample(1000.0 + self._clock.now(), self._loads, dict.fromkeys(self._loads, "up"))

    def encode(self, sample: Sample) -> bytes:
        self.encoded.append(encode_sample(sample))
        return self.encoded[-1]


def test_samples_are_taken_and_encoded_once_however_many_listen() -> None:
    async def main() -> None:
        clock = Ticking()
        fleet = Asked(clock, units=64)
        samples = LiveSamples(fleet.take, fleet.encode)
        listeners = [Listener(samples) for _ in range(20)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(samples.run(clock))
            await turns()
            for _ in range(25):
                await clock.tick()
            assert fleet.asked == len(fleet.encoded) == 3  # for the history alone: at 0, 10 and 20 s
            for listener in listeners:
                tasks.create_task(listener.read())
            await turns()
            for second in range(5):
                await clock.tick()
                for listener in listeners:
                    await listener.until(2 + second)
            samples.close()
            running.cancel()
        assert fleet.asked == len(fleet.encoded) == 8
        for listener in listeners:
            kinds = [kind for kind, _ in listener.events]
            assert kinds == ["history", *["sample"] * 5]
            history = listener.events[0][1]["samples"]
            assert [one["at"] for one in history] == [1000.0, 1010.0, 1020.0]
            assert [one["at"] for _, one in listener.events[1:]] == [1026.0 + second for second in range(5)]
            # nobody has a copy: the bytes of a sample are the same object for all
            sent = [id(body) for body in listener.said if body.startswith(b"id: ")]
            assert sent == [id(body) for body in listeners[0].said if body.startswith(b"id: ")]
            assert listener.over

    asyncio.run(main())


def test_nothing_is_asked_each_second_once_nobody_listens_any_more() -> None:
    async def main() -> None:
        clock = Ticking()
        fleet = Asked(clock)
        samples = LiveSamples(fleet.take, fleet.encode)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(samples.run(clock))
            reading = tasks.create_task(Listener(samples).read())
            await turns()
            await clock.tick()
            reading.cancel()
            await turns()
            asked = fleet.asked
            for _ in range(8):
                await clock.tick()
            assert fleet.asked == asked == 2
            running.cancel()

    asyncio.run(main())


def test_who_comes_again_gets_what_came_since_and_a_slow_reader_misses_some() -> None:
    async def main() -> None:
        clock = Ticking()
        fleet = Asked(clock)
        samples = LiveSamples(fleet.take, fleet.encode)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(samples.run(clock))
            await turns()
            for _ in range(30):
                await clock.tick()
            again, odd = Listener(samples, "1010.0"), Listener(samples, "nobody's")
            tasks.create_task(again.read())
            tasks.create_task(odd.read())
            await again.until(1)
            await odd.until(1)
            samples.close()
            running.cancel()
        assert [one["at"] for one in again.events[0][1]["samples"]] == [1020.0, 1030.0]
        assert len(odd.events[0][1]["samples"]) == 4

    asyncio.run(main())


def test_a_history_covers_an_hour_in_bounded_memory() -> None:
    history = SampleHistory()
    for second in range(2 * 3600):
        history.keep(float(second), b"%05d" % second + bytes(35))
    kept = [int(one[:5]) for one in history.since(0)]
    assert kept == list(range(3590, 7200, 10))
    large = SampleHistory(most=100_000)
    for second in range(3 * 3600):
        large.keep(float(second), b"%05d" % second + bytes(995))
        assert large.size <= 100_000
    kept = [int(one[:5]) for one in large.since(0)]
    assert large.size == 1000 * len(kept)
    assert large.step == 40.0
    assert kept[-1] - kept[0] > 3500
    assert {later - sooner for sooner, later in pairwise(kept)} <= {20, 40, 60, 80}
    assert large.size > 50_000


def test_a_clock_that_is_set_back_ends_what_is_kept_of_its_future() -> None:
    history = SampleHistory()
    for at in (1000.0, 1010.0, 500.0, 510.0):
        history.keep(at, b"%d" % at)
    assert list(history.since(0)) == [b"500", b"510"]
