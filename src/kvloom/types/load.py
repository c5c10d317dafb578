"""What an engine reports of itself: numbers, never lists of requests."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kvloom.types.request import Level

STEP_WINDOW: Final = 16  # decode steps of which `step_seconds` is the median


class LevelLoad(Struct, frozen=True, kw_only=True):
    """One level of execution priority: sequences that run, and tokens of room that they have together beside
    what they hold."""

    priority: int
    headroom: int
    running: int


class ModelLoad(Struct, frozen=True, kw_only=True):
    """One model's share of a unit. Blocks are the pool's; counts since start end in `_total`. used: held by
    sequences, reservations and pins; cached: held by none, and taken when they are needed; pinned: those of
    the used ones that a pin keeps. What is still to be taken, cached or not: begun_blocks by the prompts that
    are being computed, head_blocks by the first sequence that waits, waiting_blocks by all that wait. A page
    is page_blocks blocks and holds page_tokens tokens. levels: those at which something runs.
    cached_tokens_total: tokens that were not computed because they were cached here, before anyone sent them
    for the request itself. received_tokens_total: tokens whose K and V peers have written here. away:
    sequences whose K and V are lent room by another unit; away_tokens_total: tokens for which it attended;
    away_share: of the sequences that run, those that are to be away. step_seconds: what a decode step takes
    of late, a median; 0 where there was none."""

    waiting: int
    running: int
    used_blocks: int
    cached_blocks: int
    pinned_blocks: int
    quota_blocks: int
    begun_blocks: int
    head_blocks: int
    waiting_blocks: int
    page_blocks: int
    page_tokens: int
    prompt_tokens_total: int
    cached_tokens_total: int
    received_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    prefill_jobs_total: int
    decode_jobs_total: int
    levels: tuple[LevelLoad, ...] = ()
    away: int = 0
    away_tokens_total: int = 0
    away_share: float = 0.0
    step_seconds: float = 0.0

    @property
    def token_blocks(self) -> float:
        """Blocks that a token takes on average."""
        return self.page_blocks / self.page_tokens

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_tokens) * self.page_blocks


class Waits(Struct, frozen=True, kw_only=True):
    """Of a unit that attends for another: how long the last tasks waited, in seconds, from being posted to
    their begin, and by the queueing model should have (`offload/queueing.py`). ahead: what the asking unit
    has to do meanwhile, less `service`, what a task takes. wait: on average; beyond: of those that waited
    longer than `ahead`; stall: by which they waited longer, on average over all. parts: that an iteration of
    own models is split into, at most."""

    tasks_total: int
    ahead: float
    parts: int
    service: float
    wait: float
    beyond: float
    stall: float
    expected_wait: float
    expected_beyond: float
    expected_stall: float


class UnitLoad(Struct, frozen=True, kw_only=True):
    """draining: what runs here is to end or to go elsewhere, and nothing is to come. lent_blocks: those that
    another unit has for a while. priorities: the levels of execution priority that are told apart here."""

    total_blocks: int
    free_blocks: int
    block_bytes: int
    policy: str
    models: dict[str, ModelLoad]
    draining: bool = False
    lent_blocks: int = 0
    waits: Waits | None = None
    priorities: tuple[Level, ...] = ()

    @property
    def running(self) -> int:
        return sum(model.running for model in self.models.values())
