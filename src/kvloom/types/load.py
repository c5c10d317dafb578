"""The load that an engine reports: numbers, never lists of requests."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvloom.types.request import Level
from kvloom.types.spec import Slo

STEP_WINDOW: Final = 16  # decode steps of which `step_seconds` is the median


class LevelLoad(Struct, frozen=True, kw_only=True):
    """The load of one level of execution priority (Llumnix, section 4.4)."""

    priority: int
    headroom: int  # tokens of room that the level's sequences have together beside what they hold
    running: int  # sequences of the level that run


class WeightLoad(Struct, frozen=True, kw_only=True):
    """Tells of the weights of a model that can sleep."""

    awake: bool
    blocks: int  # whose memory they have
    wakes_total: int
    wake_seconds: float  # that they took to be read the last time; 0 if they were not yet


class ModelLoad(Struct, frozen=True, kw_only=True):
    """The part of one model in a unit's load. Blocks are the pool's. Counts since the start end in
    `_total`."""

    waiting: int  # sequences
    running: int
    used_blocks: int  # held by sequences, reservations and pins
    cached_blocks: int  # held by nobody, and taken if they are needed
    pinned_blocks: int  # those of the used blocks that a pin keeps
    quota_blocks: int
    begun_blocks: int  # still to be taken, cached or not, by the prompts that are being computed
    head_blocks: int  # still to be taken by the first sequence that waits
    waiting_blocks: int  # still to be taken by all sequences that wait
    page_blocks: int  # blocks of a page
    page_tokens: int  # tokens that a page holds
    prompt_tokens_total: int
    cached_tokens_total: int  # not computed, because they were cached here before anyone sent them
    received_tokens_total: int  # tokens whose K and V peers have written here
    output_tokens_total: int
    preemptions_total: int
    prefill_jobs_total: int
    decode_jobs_total: int
    levels: tuple[LevelLoad, ...] = ()  # those at which something runs
    away: int = 0  # sequences that are offloaded to another unit
    away_tokens_total: int = 0  # tokens for which another unit attended
    away_share: float = 0.0  # of the running sequences, the share that is to be offloaded
    displaced_total: int = 0  # requests that gave their place in a full queue to another
    unread_total: int = 0  # times that a sequence stood still because nobody read its stream
    unread_blocks_total: int = 0  # blocks that those gave back
    step_seconds: float = 0.0  # median of the last decode steps; 0 if there was none
    prefill_speed: float = 0.0  # tokens a second of the last prefill jobs; 0 if there was none
    mixed_jobs_total: int = 0  # that count both as prefill jobs and as decode jobs
    restored_tokens_total: int = 0  # tokens whose K and V came back from the folder of `cache_dir`
    drafted_tokens_total: int = 0  # tokens that decode steps verified
    accepted_tokens_total: int = 0  # those of them that were right
    weights: WeightLoad | None = None  # None if they never sleep
    oldest_wait: float = 0.0  # seconds for which the sequence that waits longest has waited
    slo: Slo = Slo()

    @property
    def busy(self) -> bool:
        """Tells whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def token_blocks(self) -> float:
        """The blocks that a token takes on average."""
        return self.page_blocks / self.page_tokens

    def blocks(self, tokens: int) -> int:
        """Returns the number of blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_tokens) * self.page_blocks


class Waits(Struct, frozen=True, kw_only=True):
    """The waits of another unit's last attention tasks here, from being posted to their begin, in seconds,
    beside what the queueing model expects (`offload/queueing.py`)."""

    tasks_total: int
    ahead: float  # what the asking unit has to do meanwhile, less `service`
    parts: int  # the most parts that an iteration of this unit's own models is split into
    service: float  # what a task takes
    wait: float  # mean of all tasks
    beyond: float  # mean of the tasks that waited longer than `ahead`
    stall: float  # mean over all tasks of the time by which they waited longer than `ahead`
    expected_wait: float
    expected_beyond: float
    expected_stall: float


class LinkLoad(Struct, frozen=True):
    """Tells what a unit has measured of its way to another one."""

    path: str  # the kind of the endpoint by which K and V go
    rate: float  # bytes a second, when the two met


class UnitLoad(Struct, frozen=True, kw_only=True):
    """The load of one unit."""

    total_blocks: int
    free_blocks: int
    block_bytes: int
    policy: str
    models: dict[str, ModelLoad]
    began: float = 0.0  # when the engine began, by its own clock: another time is another engine
    moves: bool = True  # requests may move to this unit and from it
    draining: bool = False  # what runs here is to end or to go elsewhere, and nothing is to come
    lent_blocks: int = 0  # lent to another unit for a while
    recalled_blocks: int = 0  # of those, that the other unit is asked to hand back
    waits: Waits | None = None
    priorities: tuple[Level, ...] = ()  # the levels of execution priority that the unit tells apart
    path: str = ""  # the kind of the endpoint by which the unit sends K and V
    sent_bytes_total: int = 0  # of K and V, to other units
    sent_seconds_total: float = 0.0  # for which some were being sent
    links: dict[str, LinkLoad] = {}  # to each unit to which the way was measured, by its name
    adapters: dict[str, str] = {}  # the base of each adapter that is served, in whose load its requests count

    def model(self, name: str) -> ModelLoad | None:
        """Returns the load of a model, or that of an adapter's base; None if it is not served."""
        return self.models.get(self.base_of(name))

    def base_of(self, name: str) -> str:
        """Returns the model in whose load the requests of a model or an adapter count."""
        return self.adapters.get(name, name)

    @property
    def running(self) -> int:
        """The number of sequences that run, of all models."""
        return sum(model.running for model in self.models.values())
