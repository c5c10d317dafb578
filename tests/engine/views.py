"""Views of a unit for policies to answer."""

from __future__ import annotations

import itertools
from math import inf

from hypothesis import strategies as st

from kvloom.engine.batching.view import STARVING, ModelView, UnitView

COMPUTE = (1, 2, 3, 8)
NOBODY = (0, 0, 0)
JOBS = 1000


def model(name: str = "a", *, waited: int = 0, now: int = JOBS, **changes: object) -> ModelView:
    """An idle model with a quota of 50 blocks in pages of 2, whose head has waited for `waited` jobs."""
    values: dict[str, object] = {
        "name": name,
        "waiting": 0,
        "partial": 0,
        "head_blocks": 0,
        "head": NOBODY,
        "decodable": 0,
        "decode_blocks": 0,
        "held": 0,
        "victim": NOBODY,
        "running": 0,
        "prefilling": False,
        "decoding": False,
        "used": 0,
        "quota": 50,
        "page_blocks": 2,
        "last_prefill": 0,
        "last_decode": 0,
        "head_since": now - waited,
    }
    return ModelView(**(values | changes))  # type: ignore[arg-type]


def unit(*models: ModelView, compute: int = 2, **changes: object) -> UnitView:
    """A pool of 100 blocks of which `models` leave the rest."""
    values: dict[str, object] = {
        "models": models,
        "compute": compute,
        "idle": compute,
        "free_blocks": 100 - sum(m.used for m in models),
        "total_blocks": 100,
        "last_was_prefill": False,
        "jobs": JOBS,
        "served": len(models),
    }
    return UnitView(**(values | changes))  # type: ignore[arg-type]


@st.composite
def views(draw: st.DrawFn) -> UnitView:
    """Any view that an engine could show."""
    compute = draw(st.sampled_from(COMPUTE))
    total, now = draw(st.integers(20, 200)), draw(st.sampled_from([200, 600]))
    idle, used, arrival = compute, 0, itertools.count()
    models: list[ModelView] = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        page = draw(st.integers(1, 5))
        jobs = {
            phase: idle >= 1 and draw(st.booleans()) and not (phase == "prefill" and idle < 1)
            for phase in ("prefill", "decode")
        }
        for runs in jobs.values():
            idle -= draw(st.integers(1, idle)) if runs and idle else 0
        decodable, partial = draw(st.integers(0, 6)), draw(st.integers(0, 1))
        held = decodable + partial
        running = held + sum(jobs.values())
        room = (total - used) // page
        pages = draw(st.integers(min(running, room), room)) if running else 0
        used += pages * page
        full = draw(st.booleans())
        waiting = 0 if full else draw(st.integers(0, 5))
        models.append(
            model(
                name,
                waiting=waiting,
                partial=partial,
                head_blocks=draw(st.integers(0, total // page)) * page if waiting or partial else 0,
                head=(draw(st.integers(0, 1)), next(arrival), 0),
                decodable=decodable,
                decode_blocks=draw(st.integers(0, decodable)) * page,
                held=held,
                victim=(draw(st.integers(0, 1)), next(arrival), 0) if held else NOBODY,
                running=running,
                prefilling=jobs["prefill"],
                decoding=jobs["decode"],
                used=pages * page,
                quota=draw(st.integers(page, total)),
                page_blocks=page,
                last_prefill=draw(st.integers(0, 200)),
                last_decode=draw(st.integers(0, 200)),
                now=now,
                waited=draw(st.sampled_from([0, STARVING, STARVING + 1, 500])),
                prefill_share=draw(st.integers(0, compute)),
                decode_share=draw(st.integers(0, compute)),
                outnumbered=held > 0 and draw(st.booleans()),
                running_full=full,
                mixes=draw(st.booleans()),
                head_latest=draw(st.sampled_from([-inf, 40.0, 50.5, 60.0])),
                head_tokens=draw(st.integers(1, 400)) if waiting or partial else 0,
                step_due=draw(st.sampled_from([40.0, 50.1, 60.0, inf])) if decodable else inf,
                step_order=(draw(st.integers(0, 1)) if decodable else 0, 0, 0),
                step_seconds=draw(st.sampled_from([0.0, 0.02, 0.3])) if decodable else 0.0,
                token_seconds=draw(st.sampled_from([0.0, 0.001, 0.01])),
                tpot=draw(st.sampled_from([0.01, 0.2, 5.0])),
            )
        )
    return UnitView(
        tuple(models),
        len(models) + draw(st.integers(0, 3)),
        compute,
        idle,
        total - used,
        total,
        draw(st.booleans()),
        now,
        draw(st.integers(0, compute // 2)),
        draw(st.booleans()),
        mixes=draw(st.booleans()),
        now=50.0,
    )
