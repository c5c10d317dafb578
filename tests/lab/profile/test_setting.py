"""What is measured: it fits the engine it is measured for, and leaves nothing out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.lab.profile.beside import MOST_PAIRS, pairs
from kvloom.lab.profile.jobs import Limits, Setting, decode, grid, prefill, shares
from kvloom.plan.cost.work import Work
from kvloom.types.job import Phase

ROOMY = Limits(context=4096, page=32, tokens=1 << 20, chunk=512, batch=256)

limits = st.builds(
    Limits,
    context=st.integers(32, 8192),
    page=st.integers(1, 64),
    tokens=st.integers(128, 1 << 20),
    chunk=st.integers(8, 2048),
    batch=st.integers(1, 512),
)


@given(limits, st.integers(1, 64), st.booleans())
def test_a_job_is_one_that_the_engine_could_make(limits: Limits, cores: int, quick: bool) -> None:
    found = grid("m", cores, limits, quick=quick)
    assert {setting.phase for setting in found} == set(Phase)
    assert len(set(found)) == len(found)
    for setting in found:
        assert setting.cores == cores
        lengths = [start + append for start, append in zip(setting.starts, setting.appends, strict=True)]
        assert max(lengths) <= limits.context
        assert sum(lengths) <= limits.tokens
        assert len(lengths) <= limits.batch
        assert min(setting.appends) >= 1
        if setting.phase is Phase.PREFILL:
            assert sum(setting.appends) <= limits.chunk
        else:
            assert set(setting.appends) == {1}
            assert min(setting.starts) >= 1


def test_a_grid_has_what_a_curve_needs() -> None:
    found = [setting.work(2) for setting in grid("m", 1, ROOMY)]
    decodes = [work for work in found if work.phase is Phase.DECODE]
    prefills = [work for work in found if work.phase is Phase.PREFILL]
    assert {1, 2, 4, 8, 16, 32, 64, 96, 128, 256} <= {work.batch for work in decodes}
    assert {4, 8, 16, 32, 64, 128, 256, 512} <= {work.tokens for work in prefills}
    for batch in (1, 16, 64):
        assert len({work.context for work in decodes if work.batch == batch}) >= 4
    assert {work.batch for work in prefills} >= {1, 4, 16}
    assert any(work.context and work.tokens > 100 for work in prefills)
    assert {work.share for work in found} == {0.5}
    assert len(grid("m", 1, ROOMY, quick=True)) < len(found) / 3


def test_settings_are_the_work_that_they_say() -> None:
    assert prefill("m", 1, 3, 8).work(2) == Work.prefill("m", 0.5, [3, 3, 2])
    assert decode("m", 2, 2, 10).work(2) == Work.decode("m", 1.0, [5, 15])
    assert prefill("m", 1, 1, 4, 10).work(1).pairs == 4 * 10 + 10


def test_shares_of_small_and_large_machines() -> None:
    assert shares(1) == [1]
    assert shares(2) == [1, 2]
    assert shares(6) == [1, 2, 3, 4, 6]
    assert shares(64) == [1, 2, 3, 4, 8, 16, 32, 64]


def kinds(pair: tuple[Setting, Setting]) -> tuple[str, Phase, str, Phase]:
    return pair[0].model, pair[0].phase, pair[1].model, pair[1].phase


def test_pairs_are_those_that_adbs_makes() -> None:
    found = pairs(["a", "b"], 5, {"a": ROOMY, "b": ROOMY})
    assert {kinds(pair) for pair in found} == {
        *((one, Phase.PREFILL, other, Phase.DECODE) for one in "ab" for other in "ab"),
        ("a", Phase.DECODE, "b", Phase.DECODE),
    }
    assert all(one.cores + other.cores <= 5 for one, other in found)
    assert {one.cores for one, _ in found if one.phase is Phase.PREFILL} == {3}


def test_one_core_has_no_pairs_and_many_models_not_all() -> None:
    assert pairs(["a", "b"], 1, {"a": ROOMY, "b": ROOMY}) == []
    names = [f"m{i}" for i in range(12)]
    found = pairs(names, 2, dict.fromkeys(names, ROOMY))
    assert len(found) <= MOST_PAIRS
    assert len({kinds(pair) for pair in found}) == len(found)


@given(limits)
def test_pairs_fit_together(limits: Limits) -> None:
    for one, other in pairs(["a", "b"], 2, {"a": limits, "b": limits}):
        assert sum(one.starts + one.appends + other.starts + other.appends) <= limits.tokens
