"""Load reports to decide on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from kvloom.engine.freeness import Arrival
from kvloom.types.load import LevelLoad, ModelLoad, UnitLoad
from kvloom.types.request import Level

PAGE = 16  # tokens
NAMES = ("m", "m1", "m2", "m3", "m4", "m5", "m6", "m7")


def model(running: int = 0, tokens: int = 0, *, page: int = PAGE, size: int = 1, **other: Any) -> ModelLoad:
    """Of that many running sequences, which hold `tokens` tokens in whole pages of `size` blocks."""
    fields: dict[str, Any] = {
        "waiting": 0,
        "running": running,
        "used_blocks": -(-tokens // page) * size,
        "cached_blocks": 0,
        "pinned_blocks": 0,
        "quota_blocks": 0,
        "begun_blocks": 0,
        "head_blocks": 0,
        "waiting_blocks": 0,
        "page_blocks": size,
        "page_tokens": page,
        "prompt_tokens_total": 0,
        "cached_tokens_total": 0,
        "received_tokens_total": 0,
        "output_tokens_total": 0,
        "preemptions_total": 0,
        "prefill_jobs_total": 0,
        "decode_jobs_total": 0,
    }
    return ModelLoad(**fields | other)


def unit(
    *models: ModelLoad,
    blocks: int = 1000,
    draining: bool = False,
    names: Sequence[str] = NAMES,
    priorities: tuple[Level, ...] = (),
) -> UnitLoad:
    named = dict(zip(names, models, strict=False))
    used = sum(one.used_blocks for one in named.values())
    return UnitLoad(
        total_blocks=blocks,
        free_blocks=max(0, blocks - used),
        block_bytes=4096,
        policy="adbs",
        models=named,
        draining=draining,
        priorities=priorities,
    )


@st.composite
def model_loads(draw: st.DrawFn) -> ModelLoad:
    """Any that an engine could report."""
    page, size = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    running, waiting = draw(st.integers(0, 20)), draw(st.integers(0, 5))
    high = draw(st.integers(0, running))
    pages = st.integers(0, 50)
    head = draw(st.integers(1, 50)) * size if waiting else 0
    behind = draw(pages) * size if waiting > 1 else 0
    return model(
        running,
        page=page,
        size=size,
        waiting=waiting,
        used_blocks=draw(pages) * size,
        begun_blocks=draw(pages) * size if running else 0,
        head_blocks=head,
        waiting_blocks=head + behind,
        levels=(LevelLoad(priority=-1, headroom=draw(st.sampled_from([160, 1600])), running=high),)
        * (high > 0),
    )


@st.composite
def unit_loads(draw: st.DrawFn, most: int = 2) -> UnitLoad:
    models = draw(st.lists(model_loads(), min_size=1, max_size=most))
    levels = draw(st.sampled_from([(), (Level(-1, 160),), (Level(-1, 160), Level(-2, 1600))]))
    blocks = draw(st.integers(1, 5000))
    return unit(*models, blocks=blocks, draining=draw(st.booleans()), priorities=levels)


arrivals = st.builds(
    Arrival,
    model=st.just("m"),
    prompt=st.integers(1, 2000),
    choices=st.integers(1, 4),
    priority=st.integers(-3, 1),
)


def fleets(most: int = 6) -> st.SearchStrategy[dict[str, UnitLoad]]:
    loads = st.lists(unit_loads(), max_size=most)
    return loads.map(lambda some: {f"u{at}": load for at, load in enumerate(some)})
