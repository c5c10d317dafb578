"""Quotas: what they sum to, where they stop, and which way they move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.kv.quota import (
    SEQUENCE_TOKENS,
    QuotaUsage,
    SequenceUse,
    adapt_quotas,
    initial_caps,
    initial_quotas,
    move_caps,
    sequence_blocks,
)
from kvloom.types.geometry import Geometry

WIDE = Geometry(layers=4, kv_heads=4, head_dim=16, itemsize=4, block_bytes=1024)  # 8 tokens, 16 blocks
THIN = Geometry(layers=2, kv_heads=1, head_dim=16, itemsize=2, block_bytes=1024)  # 16 tokens, 2 blocks

_NAMES = st.sets(st.sampled_from("abcde"), min_size=1)


@st.composite
def _geometries(draw: st.DrawFn) -> dict[str, Geometry]:
    return {
        name: Geometry(draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(4, 32)), 4, 1024)
        for name in sorted(draw(_NAMES))
    }


@given(data=st.data(), geometries=_geometries(), total=st.integers(50, 5000))
def test_initial_quotas_share_the_pool(
    data: st.DataObject, geometries: dict[str, Geometry], total: int
) -> None:
    rates = {name: data.draw(st.floats(0, 100)) for name in geometries}
    quotas = initial_quotas(total, geometries, rates)
    assert all(quotas[name] >= geometry.blocks_per_page for name, geometry in geometries.items())
    pages = sum(geometry.blocks_per_page for geometry in geometries.values())
    assert total - len(quotas) < sum(quotas.values()) <= total + pages
    even = total / len(quotas)
    assert all(quota >= 0.25 * even / 1.25 - 1 for quota in quotas.values())  # nobody is left with nothing


def test_initial_quotas_follow_rate_and_blocks_a_token() -> None:
    geometries = {"wide": WIDE, "thin": THIN}
    assert initial_quotas(900, geometries, {"wide": 1.0, "thin": 16.0}) == {"wide": 450, "thin": 450}
    assert initial_quotas(900, geometries, {"wide": 1.0, "thin": 8.0}) == {"wide": 600, "thin": 300}
    assert initial_quotas(900, geometries, {"wide": 0.0, "thin": 0.0}) == {"wide": 450, "thin": 450}


@st.composite
def _periods(draw: st.DrawFn) -> tuple[int, dict[str, int], dict[str, QuotaUsage]]:
    quotas = {name: draw(st.integers(1, 1000)) for name in sorted(draw(_NAMES))}
    usage = {
        name: QuotaUsage(draw(st.floats(0, 1500)), draw(st.sampled_from([0, 0, 1, 40, 5000])))
        for name in quotas
    }
    return sum(quotas.values()), quotas, usage


@given(period=_periods())
def test_adapting_moves_blocks_from_the_idle_to_the_pressed(
    period: tuple[int, dict[str, int], dict[str, QuotaUsage]],
) -> None:
    total, quotas, usage = period
    after = adapt_quotas(total, quotas, usage)
    assert sum(after.values()) == total
    floor = int(0.25 * total / len(quotas))
    for name, quota in after.items():
        before, use = quotas[name], usage[name]
        if quota > before:
            assert use.wanted
            assert use.used >= 0.9 * before
            assert quota - before <= max(1, min(use.wanted, 0.1 * total))
        if quota < before:
            assert not use.wanted
            assert quota >= floor
            assert quota >= int(use.used / 0.95)
    takers = [n for n in quotas if usage[n].wanted and usage[n].used >= 0.9 * quotas[n]]
    givers = [n for n in quotas if not usage[n].wanted and quotas[n] > max(int(usage[n].used / 0.95), floor)]
    if takers and givers:
        assert after != quotas
    else:
        assert after == quotas


def test_adapting_settles() -> None:
    """A pressed model takes all that an idle one does not keep, step by step, and then no more."""
    quotas = {"busy": 500, "idle": 500}
    seen = [quotas]
    while len(seen) < 20:
        usage = {"busy": QuotaUsage(0.95 * quotas["busy"], 10_000), "idle": QuotaUsage(0.0, 0)}
        quotas = adapt_quotas(1000, quotas, usage)
        seen.append(quotas)
    assert seen[1] == {"busy": 600, "idle": 400}
    assert seen[-1] == seen[-2] == {"busy": 875, "idle": 125}


# -- bounds on sequences, as MuxServe's published code has them ---------------------------------------------

BOTH = {"wide": WIDE, "thin": THIN}


def test_a_bound_counts_whole_pages_of_416_tokens_for_each_sequence() -> None:
    assert SEQUENCE_TOKENS == 416
    assert sequence_blocks(WIDE) == 52 * 16
    assert sequence_blocks(THIN) == 26 * 2
    assert initial_caps({"wide": 10 * 832, "thin": 51}, BOTH) == {"wide": 10, "thin": 1}


def test_a_full_model_with_a_queue_takes_a_tenth_of_what_it_runs() -> None:
    use = {"wide": SequenceUse(ran=10.0, asked=40), "thin": SequenceUse(ran=20.0, asked=20)}
    moved = move_caps({"wide": 10, "thin": 200}, use, BOTH)
    assert moved == {"wide": 11, "thin": 200 - 832 // 52}


def test_nothing_moves_without_a_queue_or_without_anything_to_give() -> None:
    caps = {"wide": 10, "thin": 100}
    calm = {"wide": SequenceUse(10.0, 10), "thin": SequenceUse(5.0, 5)}
    assert move_caps(caps, calm, BOTH) == caps
    full = {"wide": SequenceUse(10.0, 90), "thin": SequenceUse(99.0, 500)}
    assert move_caps(caps, full, BOTH) == caps


@given(data=st.data(), geometries=_geometries())
def test_moved_bounds_hold_no_more_blocks_than_before(
    data: st.DataObject, geometries: dict[str, Geometry]
) -> None:
    caps = {name: data.draw(st.integers(1, 400)) for name in geometries}
    use = {
        name: SequenceUse(data.draw(st.floats(0, cap)), data.draw(st.integers(0, 900)))
        for name, cap in caps.items()
    }
    moved = move_caps(caps, use, geometries)
    blocks = {name: sequence_blocks(geometry) for name, geometry in geometries.items()}
    lifted = sum(blocks[name] for name, cap in moved.items() if cap == 1)  # nobody is left with none
    held = sum(cap * blocks[name] for name, cap in caps.items())
    assert sum(cap * blocks[name] for name, cap in moved.items()) <= held + lifted
