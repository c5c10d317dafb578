"""What an engine reports of itself: numbers, never lists of requests."""

from __future__ import annotations

from msgspec import Struct


class ModelLoad(Struct, frozen=True, kw_only=True):
    """One model's share of a unit. Blocks are the pool's; counts since start end in `_total`. used: held by
    sequences, reservations and pins; cached: held by none, and taken when they are needed; pinned: those of
    the used ones that a pin keeps. cached_tokens_total: tokens that were not computed because they were
    cached here, before anyone sent them for the request itself. received_tokens_total: tokens whose K and V
    peers have written here."""

    waiting: int
    running: int
    used_blocks: int
    cached_blocks: int
    pinned_blocks: int
    quota_blocks: int
    prompt_tokens_total: int
    cached_tokens_total: int
    received_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    prefill_jobs_total: int
    decode_jobs_total: int


class UnitLoad(Struct, frozen=True, kw_only=True):
    total_blocks: int
    free_blocks: int
    block_bytes: int
    policy: str
    models: dict[str, ModelLoad]
