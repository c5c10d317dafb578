"""Prometheus metrics: the gateway's own counts, and the engines' loads at the moment of the scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, time
from types import MappingProxyType
from typing import Final, get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvloom.engine.freeness import freeness
from kvloom.journal.lives import Lives, Story
from kvloom.journal.traffic import TrafficCounts
from kvloom.types.errors import KvloomError, QueueFull, RequestQuarantined
from kvloom.types.load import ModelLoad, UnitLoad, WeightLoad
from kvloom.types.service import IN_SERVICE, NodeService, Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNKNOWN = "unknown"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class KeyCounts:
    """Counts what was done for one key with a name."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """The number of refused requests, by the limit that was reached."""

    def refuse(self, limit: str) -> None:
        self.refusals[limit] = self.refusals.get(limit, 0) + 1


class Metrics:
    """The metrics of one gateway. Its registry is its own, so that two gateways can live in one process."""

    def __init__(self) -> None:
        self.lives = Lives()
        """The lives of the last requests that were measured."""
        self.traffic = TrafficCounts()
        """The requests since the counts were last written down."""
        self._registry = CollectorRegistry()
        by = ["model"]
        self.requests = self._counter("requests", "Requests by model and status.", ["model", "status"])
        self.quarantined = self._counter(
            "requests_quarantined", "Requests refused or ended because engines died of them.", by
        )
        self.prompt_tokens = self._counter("request_prompt_tokens", "Prompt tokens of answered requests.", by)
        self.output_tokens = self._counter("request_output_tokens", "Output tokens of answered requests.", by)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Of streams: from arrival to the first token.", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Of streams: mean time between tokens.", _TOKEN_SECONDS
        )
        self.latency = self._histogram("request_seconds", "From the request's arrival to its end.", _SECONDS)

    def watch(self, request: str = "", trace: str = "") -> Watch:
        """Returns what measures a request that has come. request: its id; trace: its `traceparent`."""
        return Watch(self, self.lives.begin(request, trace))

    def render(
        self,
        loads: Mapping[str, UnitLoad],
        services: Mapping[str, Service],
        moves: Mapping[str, int],
        keys: Mapping[str, KeyCounts],
        choices: Mapping[tuple[str, str], int] = MappingProxyType({}),
        *,
        waiting: Mapping[str, int] = MappingProxyType({}),
        nodes: Mapping[str, NodeService] = MappingProxyType({}),
    ) -> bytes:
        """Returns all metrics as Prometheus reads them.

        `loads` holds the reports of the units that answer, `services` the states of all units, `moves` the
        number of moved requests by outcome, `keys` the counts of keys by their names, `choices` how often
        K and V were copied or computed again, by what it was and why, `waiting` the number of requests that
        no unit can answer yet, by model, and `nodes` the states of a cluster's nodes.
        """
        whole = CollectorRegistry()
        whole.register(_WithoutTimes(self._registry))
        whole.register(_EngineLoads(loads, services, moves, choices, waiting))
        whole.register(_Nodes(nodes))
        whole.register(_Keys(keys))
        return generate_latest(whole)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"kvloom_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvloom_{name}", text, ["model"], buckets=buckets, registry=self._registry)


class Watch:
    """Measures one request, which is counted once, however it ends."""

    def __init__(self, metrics: Metrics, life: Story) -> None:
        self.life = life
        self.model = UNKNOWN
        self.base = ""
        """The model whose adapter it is; empty if it is none."""
        self.prompts = 1
        """How many the request has."""
        self.request = ""
        """The id by which engines and the journal know the request; nothing until it is prepared."""
        self.status = 0
        """The HTTP status of the answer, once it is over; 0 before."""
        self.tokens = (0, 0)
        """The tokens of the prompts and of the answer, once that is over."""
        self._metrics = metrics
        self._arrived = monotonic()
        self._arrived_at = time()
        self._first: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return monotonic() - self._arrived

    @property
    def first_seconds(self) -> float | None:
        """Seconds until a stream's first token."""
        return None if self._first is None else self._first - self._arrived

    def made_tokens(self) -> None:
        """Notes the time of a stream's first token. A whole answer's large frames tell nothing of it."""
        if self._first is None:
            self._first = monotonic()
            self._metrics.first_token.labels(self.model).observe(self._first - self._arrived)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Counts the request if it fails in this block. A client that hangs up counts as status 499."""
        try:
            yield
        except KvloomError as error:
            self._count(error.status, error.code)
            raise
        except asyncio.CancelledError:
            self._count(499)
            raise

    @contextmanager
    def answering(self, counts: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Counts the request at the end of this block. A client that hangs up counts as status 499.

        `counts` returns the numbers of prompt tokens and output tokens.
        """
        status, code = 500, KvloomError.code
        try:
            yield
            status, code = 200, ""
        except KvloomError as error:
            status, code = error.status, error.code
            if isinstance(error, RequestQuarantined):
                self._metrics.quarantined.labels(self.model).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            status, code = 499, ""
            raise
        finally:
            self.tokens = counts()
            self._count(status, code)
            if status == 200:
                self._observe(*self.tokens)

    def _count(self, status: int, code: str = "") -> None:
        self.status = status
        self.life.end(status, code)
        self._metrics.requests.labels(self.model, str(status)).inc()
        traffic, tokens = self._metrics.traffic, self.life.tokens
        if self.model == UNKNOWN:
            return
        if status >= 500 or code == QueueFull.code:
            traffic.unanswered(self.model, self._arrived_at, self.base)
        elif status == 200 or (status == 499 and tokens.prompt):
            given = self.prompts, tokens.prompt, tokens.output, tokens.cached
            traffic.answered(self.model, self._arrived_at, *given, base=self.base)

    def _observe(self, prompt_tokens: int, output_tokens: int) -> None:
        metrics, model, now = self._metrics, self.model, monotonic()
        metrics.prompt_tokens.labels(model).inc(prompt_tokens)
        metrics.output_tokens.labels(model).inc(output_tokens)
        metrics.latency.labels(model).observe(now - self._arrived)
        if self._first is not None and output_tokens > 1:
            metrics.per_token.labels(model).observe((now - self._first) / (output_tokens - 1))


_ALWAYS_AWAKE: Final = WeightLoad(awake=True, blocks=0, wakes_total=0, wake_seconds=0.0)


def _weights(load: ModelLoad) -> WeightLoad:
    return load.weights or _ALWAYS_AWAKE


_UNIT: tuple[tuple[str, str, Callable[[UnitLoad], int]], ...] = (
    ("kvloom_kv_blocks", "KV blocks of the pool.", lambda load: load.total_blocks),
    ("kvloom_kv_blocks_free", "KV blocks nobody holds.", lambda load: load.free_blocks),
    ("kvloom_kv_blocks_lent", "KV blocks lent to another unit.", lambda load: load.lent_blocks),
    ("kvloom_kv_block_bytes", "Bytes of a KV block.", lambda load: load.block_bytes),
)
_GAUGES: tuple[tuple[str, str, Callable[[ModelLoad], float]], ...] = (
    ("kvloom_requests_waiting", "Requests in the engine's queue.", lambda load: load.waiting),
    (
        "kvloom_requests_waiting_oldest_seconds",
        "For how long the oldest in the engine's queue waits.",
        lambda load: load.oldest_wait,
    ),
    ("kvloom_requests_running", "Requests the engine works on.", lambda load: load.running),
    ("kvloom_kv_blocks_used", "KV blocks the model's requests and pins hold.", lambda load: load.used_blocks),
    (
        "kvloom_kv_blocks_cached",
        "KV blocks of prefixes nobody uses.",
        lambda load: load.cached_blocks,
    ),
    ("kvloom_away_sequences", "Sequences whose KV another unit holds.", lambda load: load.away),
    ("kvloom_away_share", "Share of the sequences that is to be away.", lambda load: load.away_share),
    ("kvloom_step_seconds", "What a decode step takes, a running median.", lambda load: load.step_seconds),
    (
        "kvloom_prefill_tokens_per_second",
        "Tokens a second of the last prefill jobs.",
        lambda load: load.prefill_speed,
    ),
    ("kvloom_pinned_blocks", "KV blocks that pins keep.", lambda load: load.pinned_blocks),
    ("kvloom_kv_blocks_quota", "KV blocks the model may hold.", lambda load: load.quota_blocks),
    ("kvloom_weights_blocks", "KV blocks whose memory weights have.", lambda load: _weights(load).blocks),
    ("kvloom_weights_awake", "1 if the weights are in memory, else 0.", lambda load: _weights(load).awake),
    ("kvloom_weights_wake_seconds", "What waking last took.", lambda load: _weights(load).wake_seconds),
    ("kvloom_slo_ttft_seconds", "When a first token is due.", lambda load: load.slo.ttft),
    ("kvloom_slo_tpot_seconds", "When each further token is due.", lambda load: load.slo.tpot),
)
_TOTALS: tuple[tuple[str, str, Callable[[ModelLoad], int]], ...] = (
    ("kvloom_prompt_tokens", "Prompt tokens the engine computed.", lambda load: load.prompt_tokens_total),
    ("kvloom_cached_tokens", "Tokens found in the prefix cache.", lambda load: load.cached_tokens_total),
    ("kvloom_received_tokens", "Tokens whose KV peers sent.", lambda load: load.received_tokens_total),
    (
        "kvloom_restored_tokens",
        "Tokens whose KV came from cache_dir.",
        lambda load: load.restored_tokens_total,
    ),
    ("kvloom_away_tokens", "Tokens that another unit attended for.", lambda load: load.away_tokens_total),
    ("kvloom_output_tokens", "Tokens the engine made.", lambda load: load.output_tokens_total),
    (
        "kvloom_spec_decode_draft_tokens",
        "Drafted tokens that were verified.",
        lambda load: load.drafted_tokens_total,
    ),
    (
        "kvloom_spec_decode_accepted_tokens",
        "Drafted tokens that were right.",
        lambda load: load.accepted_tokens_total,
    ),
    ("kvloom_preemptions", "Requests put back to free blocks.", lambda load: load.preemptions_total),
    (
        "kvloom_displaced_requests",
        "Requests that left a full queue to another's.",
        lambda load: load.displaced_total,
    ),
    (
        "kvloom_unread_sequences",
        "Times a sequence stood still because it was not read.",
        lambda load: load.unread_total,
    ),
    (
        "kvloom_unread_blocks",
        "KV blocks that unread sequences gave back.",
        lambda load: load.unread_blocks_total,
    ),
    ("kvloom_prefill_jobs", "Prefill jobs run.", lambda load: load.prefill_jobs_total),
    ("kvloom_decode_jobs", "Decode jobs run.", lambda load: load.decode_jobs_total),
    ("kvloom_mixed_jobs", "Jobs run that were both.", lambda load: load.mixed_jobs_total),
    ("kvloom_weights_wakes", "Times the weights were woken.", lambda load: _weights(load).wakes_total),
)


_OF_KEYS: tuple[tuple[str, str, Callable[[KeyCounts], int]], ...] = (
    ("kvloom_key_requests", "Requests of a key that began.", lambda counts: counts.requests),
    ("kvloom_key_prompt_tokens", "Prompt tokens of a key's requests.", lambda counts: counts.prompt_tokens),
    ("kvloom_key_output_tokens", "Tokens made for a key.", lambda counts: counts.output_tokens),
)


class _WithoutTimes:
    """Collects a registry's metrics without the times at which each series began.

    prometheus_client can leave these out for a whole process only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Keys:
    """Collects the counts of the keys that there are now, so that there are no more labels than keys."""

    def __init__(self, keys: Mapping[str, KeyCounts]) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _OF_KEYS:
            counter = CounterMetricFamily(name, text, labels=["key"])
            for key, counts in self._keys.items():
                counter.add_metric([key], value(counts))
            yield counter
        refusals = CounterMetricFamily(
            "kvloom_key_refusals", "Requests of a key that were refused.", labels=["key", "limit"]
        )
        for key, counts in self._keys.items():
            for limit, count in counts.refusals.items():
                refusals.add_metric([key, limit], count)
        yield refusals


class _Nodes:
    """Collects the states of a cluster's nodes."""

    def __init__(self, nodes: Mapping[str, NodeService]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        yield _states("kvloom_node_state", "1 for the state a node is in.", "node", self._nodes, NodeService)


def _states(name: str, text: str, label: str, states: Mapping[str, str], known: object) -> Metric:
    """Returns 1 for the state that each one is in, and 0 for the others that are known."""
    gauge = GaugeMetricFamily(name, text, labels=[label, "state"])
    for one, now in states.items():
        for state in get_args(known):
            gauge.add_metric([one, state], float(state == now))
    return gauge


class _EngineLoads:
    """Collects the units' reports, their states, the requests that wait for one of them, and the counts of
    those that moved between them."""

    def __init__(
        self,
        loads: Mapping[str, UnitLoad],
        services: Mapping[str, Service],
        moves: Mapping[str, int],
        choices: Mapping[tuple[str, str], int],
        waiting: Mapping[str, int],
    ) -> None:
        self._loads = loads
        self._services = services
        self._moves = moves
        self._choices = choices
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        up = [*self._services.values()].count("up")
        yield GaugeMetricFamily("kvloom_engines_up", "Engines that take requests.", value=float(up))
        yield _states("kvloom_unit_state", "1 for the state a unit is in.", "unit", self._services, Service)
        yield self._without_unit()
        yield self._freeness()
        moves = CounterMetricFamily(
            "kvloom_moves", "Running requests sent to another unit.", labels=["outcome"]
        )
        for outcome, count in self._moves.items():
            moves.add_metric([outcome], count)
        yield moves
        choices = CounterMetricFamily(
            "kvloom_kv_choices", "KV that was copied or computed again.", labels=["what", "reason"]
        )
        for labels, count in self._choices.items():
            choices.add_metric(list(labels), count)
        yield choices
        for name, text, of_unit in _UNIT:
            gauge = GaugeMetricFamily(name, text, labels=["unit"])
            for unit, load in self._loads.items():
                gauge.add_metric([unit], of_unit(load))
            yield gauge
        yield from self._sent()
        yield self._waits()
        for name, text, value in _GAUGES:
            yield self._by_model(GaugeMetricFamily(name, text, labels=["unit", "model"]), value)
        for name, text, value in _TOTALS:
            yield self._by_model(CounterMetricFamily(name, text, labels=["unit", "model"]), value)

    def _sent(self) -> Iterator[Metric]:
        """Yields what each unit has sent to others, by the path; bytes by seconds are its rate."""
        size = CounterMetricFamily(
            "kvloom_kv_sent_bytes", "Bytes of KV sent to other units.", labels=["unit", "path"]
        )
        seconds = CounterMetricFamily(
            "kvloom_kv_sent_seconds", "Time in which KV was being sent.", labels=["unit", "path"]
        )
        for unit, load in self._loads.items():
            size.add_metric([unit, load.path], load.sent_bytes_total)
            seconds.add_metric([unit, load.path], load.sent_seconds_total)
        rates = GaugeMetricFamily(
            "kvloom_kv_link_bytes_per_second",
            "The rate at which a unit's KV goes to another one, as measured.",
            labels=["unit", "peer", "path"],
        )
        for unit, load in self._loads.items():
            for peer, link in load.links.items():
                rates.add_metric([unit, peer, link.path], link.rate)
        yield from (size, seconds, rates)

    def _waits(self) -> Metric:
        """Returns what tasks of other units wait for, at each unit that lends."""
        gauge = GaugeMetricFamily(
            "kvloom_weave_wait_seconds",
            "What a task of another unit waits for, by the model and as measured.",
            labels=["unit", "wait", "source"],
        )
        for unit, load in self._loads.items():
            waits = load.waits
            for name in ("wait", "beyond", "stall") if waits else ():
                gauge.add_metric([unit, name, "measured"], getattr(waits, name))
                gauge.add_metric([unit, name, "expected"], getattr(waits, f"expected_{name}"))
        return gauge

    def _without_unit(self) -> Metric:
        gauge = GaugeMetricFamily(
            "kvloom_requests_without_unit", "Requests that no unit can answer yet.", labels=["model"]
        )
        for model in sorted(
            {*self._waiting, *(model for load in self._loads.values() for model in load.models)}
        ):
            gauge.add_metric([model], self._waiting.get(model, 0))
        return gauge

    def _freeness(self) -> Metric:
        gauge = GaugeMetricFamily(
            "kvloom_unit_freeness",
            "Decode steps for which a unit's batch finds room; "
            "below zero, tokens of its largest model that find none.",
            labels=["unit"],
        )
        for unit, load in self._loads.items():
            takes = self._services[unit] in IN_SERVICE
            gauge.add_metric([unit], freeness(load if takes else replace(load, draining=True)))
        return gauge

    def _by_model(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[ModelLoad], float]
    ) -> Metric:
        for unit, load in self._loads.items():
            for model, one in load.models.items():
                family.add_metric([unit, model], value(one))
        return family
