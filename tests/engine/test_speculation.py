"""Law 2 with drafts by n-grams and by a smaller model: streams of a model that speculates are those without
drafts."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kvloom.engine.drafts.lengths import StepTimes
from kvloom.engine.engine import Engine
from kvloom.types.errors import ConfigError
from kvloom.types.request import Guide, StartGenerate
from kvloom.types.spec import MOST_ROWS, EngineSpec
from tests.checkpoints import VOCAB, make_checkpoint, make_repeating
from tests.engines import Answer, ask, body, running, spec_of
from tests.examples import examples

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.02, "repetition_penalty": 1.02},
    {"temperature": 0.5, "logit_bias": {7: 4.0, 11: -3.0}},
    {"stop_token_ids": [4, 77, 210], "min_tokens": 9},
    {"temperature": 0.6, "stop_token_ids": [5, 99, 305]},
]


SMALL = "small"  # the model that drafts
BOTH = pytest.mark.parametrize("how", ["ngram", SMALL])


class Paths(NamedTuple):
    """The model that speculates, and one that may draft for it."""

    m: Path
    small: Path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("repeating")
    return Paths(make_repeating(folder / "m"), make_repeating(folder / SMALL, seed=1, layers=1))


@pytest.fixture(autouse=True)
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the large model are held to take the same whatever their rows are, and those of the one that
    drafts a twentieth of it; both more than they ever take, so that no draft is a loss. Otherwise what is
    drafted would depend on how busy the machine is."""

    def expected(times: StepTimes, least: int, most: int, unseen: float = 1.0) -> list[float]:
        return [1000.0] * (most - least + 1) if most > least else [50.0]

    monkeypatch.setattr(StepTimes, "expected", expected)
    monkeypatch.setattr(StepTimes, "typical", lambda *_: 1000.0)


def noted_rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Returns the rows of all steps to come, by the model; those of the target model are the largest."""
    noted, note = dict[int, list[int]](), StepTimes.note

    def noting(times: StepTimes, rows: int, seconds: float) -> None:
        noted.setdefault(id(times), []).append(rows)
        note(times, rows, seconds)

    monkeypatch.setattr(StepTimes, "note", noting)
    return noted


def speculating(paths: Paths, how: str, **changes: int) -> EngineSpec:
    spec = replace(spec_of({"m": paths.m} | ({SMALL: paths.small} if how == SMALL else {})), **changes)
    return replace(spec, models=(replace(spec.models[0], speculation=how), *spec.models[1:]))


def drawn_bodies(seed: int, count: int) -> list[StartGenerate]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 30, 70)))]
        more = rng.choice(SETTINGS)
        tokens = rng.choice((1, 2, 3, 20, 60))
        made.append(
            body("m", prompt, n=rng.choice((1, 1, 3)), max_tokens=tokens, seed=rng.randrange(99), **more)
        )
    return made


async def answers(
    spec: EngineSpec, bodies: list[StartGenerate], together: int
) -> tuple[list[Answer], Engine]:
    """The answers, so many requests at a time."""
    limit = asyncio.Semaphore(together)
    async with running(spec) as engine:

        async def one(request: StartGenerate) -> Answer:
            async with limit:
                return await ask(engine, request)

        return await asyncio.gather(*map(one, bodies)), engine


async def accepted(engine: Engine) -> int:
    return (await engine.load()).models["m"].accepted_tokens_total


def check_same(paths: Paths, how: str, bodies: list[StartGenerate], together: int, **changes: int) -> int:
    """Returns how many drafted tokens were right."""

    async def both() -> int:
        plain, _ = await answers(speculating(paths, "none"), bodies, 1)
        found, engine = await answers(speculating(paths, how, **changes), bodies, together)
        for request, one, other in zip(bodies, plain, found, strict=True):
            assert other.tokens == one.tokens, request
            ends = [
                {c: (end.reason, end.stop_token) for c, end in made.ends.items()} for made in (one, other)
            ]
            assert ends[0] == ends[1]
            for choice, reports in one.logprobs.items():
                for mine, theirs in zip(reports, other.logprobs[choice], strict=True):
                    assert (mine is None) == (theirs is None)
                    if mine and theirs:
                        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        return await accepted(engine)

    return asyncio.run(both())


@BOTH
@pytest.mark.parametrize("together", [1, 8])
def test_streams_are_those_without_drafts(paths: Paths, how: str, together: int) -> None:
    assert check_same(paths, how, drawn_bodies(together, examples(40)), together) > 20


@BOTH
def test_lengths_that_follow_the_times_of_steps_change_no_stream(
    paths: Paths, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # `even_steps`
    check_same(paths, how, drawn_bodies(8, examples(20)), 8)


@BOTH
def test_streams_are_the_same_while_sequences_are_preempted(paths: Paths, how: str) -> None:
    bodies = [body("m", [i], max_tokens=120, seed=i, temperature=0.4) for i in range(12)]

    async def crowded() -> int:
        spec = speculating(paths, how, kv_bytes=160 << 10)
        found, engine = await answers(spec, bodies, 12)
        plain, _ = await answers(speculating(paths, "none"), bodies, 1)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert await accepted(engine) > 20
        return (await engine.load()).models["m"].preemptions_total

    assert asyncio.run(crowded()) > 0


@BOTH
def test_aborts_and_pauses_in_mid_stream_leave_no_trace(paths: Paths, how: str) -> None:
    """Some leave in the middle, some are paused and go on; pool and tree are right afterwards (`running`)."""
    bodies = [body("m", [i, i + 1], max_tokens=90, seed=i, temperature=0.3) for i in range(8)]

    async def play() -> None:
        plain, _ = await answers(speculating(paths, "none"), bodies, 1)
        async with running(speculating(paths, how)) as engine:

            async def one(i: int, request: StartGenerate) -> None:
                answer = Answer()
                async for frame in engine.start_generate(request):
                    answer.take(frame)
                    made = len(answer.tokens.get(0, ()))
                    if i % 3 == 1 and made > 30:
                        break
                    if i % 3 == 2 and 30 < made < 50 and not answer.ends:
                        standing = await engine.hold(request.request)
                        assert standing.made[0].tokens[:made] == answer.tokens[0]
                        await engine.resume(request.request)
                assert answer.tokens[0] == plain[i].tokens[0][: len(answer.tokens[0])]
                assert i % 3 == 1 or answer.ends

            await asyncio.gather(*(one(i, request) for i, request in enumerate(bodies)))
            assert await accepted(engine) > 20
            again = await asyncio.gather(*(ask(engine, replace(b, request=f"{b.request}-2")) for b in bodies))
            assert [a.tokens for a in again] == [p.tokens for p in plain]

    asyncio.run(play())


@BOTH
def test_a_guided_request_does_not_draft(paths: Paths, how: str) -> None:
    async def play() -> None:
        async with running(speculating(paths, how)) as engine:
            guide = Guide(kind="regex", text="(ab)+", param="guided_regex")
            await ask(engine, body("m", [97, 98] * 8, max_tokens=40, guide=guide))
            assert (await engine.load()).models["m"].drafted_tokens_total == 0

    asyncio.run(play())


@BOTH
def test_drafts_that_cost_more_than_is_expected_are_few(
    paths: Paths, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts are held to take no time, so that each one with drafts is a loss."""
    bodies = [body("m", [i, i + 1], max_tokens=100, seed=i, temperature=0.3) for i in range(3)]

    async def drafted() -> int:
        _, engine = await answers(speculating(paths, how), bodies, 1)
        return (await engine.load()).models["m"].drafted_tokens_total

    many = asyncio.run(drafted())

    monkeypatch.setattr(StepTimes, "typical", lambda *_: 1e-9)
    few = asyncio.run(drafted())
    assert 0 < 2 * few < many


def test_trials_of_drafts_take_turns(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay at first, and then never again. From there on one of eight sequences at a time makes a trial
    of two tokens, after 16 steps without drafts, 16 more, 32 more and each 64 more."""
    count, looks, noted = 8, 0, noted_rows(monkeypatch)

    def expected(times: StepTimes, least: int, most: int, unseen: float = 1.0) -> list[float]:
        nonlocal looks
        if most == least:
            return [50.0]
        looks += 1
        return [1000.0 * (1 + (row if looks > 3 else 0)) for row in range(most - least + 1)]

    monkeypatch.setattr(StepTimes, "expected", expected)
    bodies = [body("m", [i, i + 1], max_tokens=200, seed=i, temperature=0.3) for i in range(count)]
    asyncio.run(answers(speculating(paths, SMALL), bodies, count))
    steps = max(noted.values(), key=max)
    paid = max(at for at, rows in enumerate(steps) if rows > count + 2)
    after = steps[paid + 1 : paid + 1 + 16 + 1 + 16 + 1 + 32 + 1 + 64]
    assert after == [8] * 16 + [10] + [8] * 16 + [10] + [8] * 32 + [10] + [8] * 64


def test_some_steps_have_no_drafts_however_well_these_pay(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = noted_rows(monkeypatch)
    bodies = [body("m", [i, i + 1], max_tokens=400, seed=i, temperature=0.3) for i in range(8)]
    asyncio.run(answers(speculating(paths, SMALL), bodies, 8))
    verified = max(noted.values(), key=max)
    in_a_row = "".join("d" if rows > 8 else "." for rows in verified).split(".")
    assert max(map(len, in_a_row)) == 64
    assert max(verified) == MOST_ROWS  # though eight sequences could have 15 drafts each


def test_what_drafts_lose_in_large_batches_ends_them_in_these_alone(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of four sequences or more without drafts are held to take no time, so that drafts are a loss."""
    noted = noted_rows(monkeypatch)
    monkeypatch.setattr(StepTimes, "typical", lambda _, rows, unseen: 1e-9 if rows >= 4 else 1000.0)

    async def play() -> None:
        async with running(speculating(paths, "ngram")) as engine:
            for together in (4, 1, 4):
                bodies = [
                    body("m", [i, i + 1], max_tokens=100, seed=i, temperature=0.3) for i in range(together)
                ]
                await asyncio.gather(*(ask(engine, request) for request in bodies))

    asyncio.run(play())
    [steps] = noted.values()
    alone = [at for at, rows in enumerate(steps) if rows < 4]
    assert sum(rows > 4 for rows in steps[: min(alone)]) <= 9
    assert max(steps[-40:]) <= 4
    assert len(alone) < 100


def test_ngrams_that_do_not_pay_yet_are_compared_with_what_comes(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row more costs more than drafts of which every other one is right would bring, as is assumed at
    first. So next to nothing is tried for texts out of 16 tokens, and much for those that do repeat."""
    noted = noted_rows(monkeypatch)

    def expected(times: StepTimes, least: int, most: int, unseen: float = 1.0) -> list[float]:
        return [1000.0 * (1 + 0.6 * row) for row in range(most - least + 1)]

    monkeypatch.setattr(StepTimes, "expected", expected)
    few = dict.fromkeys(range(20, 36), 100.0)
    bodies = [
        body("m", [20 + i, i], max_tokens=200, seed=i, temperature=2.0, logit_bias=few) for i in range(3)
    ]
    asyncio.run(answers(speculating(paths, "ngram"), bodies, 1))
    [steps] = noted.values()
    assert sum(rows > 1 for rows in steps) < len(steps) / 50  # a few are right by chance
    repeating = [body("m", [i, i + 1], max_tokens=200, seed=i, temperature=0.1) for i in range(3)]
    assert check_same(paths, "ngram", repeating, 1) > 50


@BOTH
def test_a_draft_that_ends_the_stream_is_its_last_token(paths: Paths, how: str) -> None:
    """Streams begin in the circle from 0 to 9, and leave it for one that has an end in its middle."""
    ends = list(range(15, VOCAB, 10))
    bodies = [body("m", [i], max_tokens=200, seed=i, temperature=0.4, stop_token_ids=ends) for i in range(10)]
    assert check_same(paths, how, bodies, 1) > 0


@BOTH
def test_a_single_sequence_at_a_time_drafts(paths: Paths, how: str) -> None:
    bodies = [body("m", [i, i + 1], max_tokens=60, seed=i, temperature=0.3) for i in range(3)]
    assert check_same(paths, how, bodies, 3, max_running=1) > 20


def test_ranks_draft_as_well(paths: Paths) -> None:
    bodies = [body("m", [i, i + 1], max_tokens=60, seed=i, temperature=0.3) for i in range(3)]
    assert check_same(paths, SMALL, bodies, 3, tensor_parallel=2) > 20


def test_what_is_drafted_gives_way_to_requests_of_the_model_that_drafts(paths: Paths) -> None:
    """Both are asked at once, in a pool that holds neither's."""
    spec = speculating(paths, SMALL, kv_bytes=200 << 10)
    bodies = [
        replace(body("m", [i], max_tokens=100, seed=i), model=("m", SMALL)[i % 2], request=f"r{i}")
        for i in range(12)
    ]

    async def both() -> None:
        found, _ = await answers(spec, bodies, 12)
        alone, _ = await answers(replace(spec, kv_bytes=4 << 20), bodies, 1)
        assert [one.tokens for one in found] == [one.tokens for one in alone]

    asyncio.run(both())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"vocab_size": VOCAB + 64},
            f"models.m.speculation: small has {VOCAB + 64} tokens and m {VOCAB}; a model with the same",
        ),
        (
            None,
            "models.m.speculation: small and m have unlike tokenizers; a model with the same one is right",
        ),
    ],
)
def test_a_model_with_other_tokens_cannot_draft(
    paths: Paths, tmp_path: Path, other: dict[str, int] | None, said: str
) -> None:
    small = make_checkpoint(tmp_path, "llama", **(other or {}))
    if other is None:
        file = small / "tokenizer.json"
        file.write_text(file.read_text().replace("<extra300>", "<other300>"))

    async def start() -> None:
        async with running(speculating(Paths(paths.m, small), SMALL)):
            pass

    with pytest.raises(ConfigError, match=re.escape(said)):
        asyncio.run(start())


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral", "gpt2"])
def test_other_architectures_verify_as_well(architecture: str, tmp_path: Path) -> None:
    """Windows, soft caps, experts, and forwards that are not fused."""
    made = make_checkpoint(tmp_path, architecture)
    rng = random.Random(architecture)
    circle = [rng.randrange(VOCAB) for _ in range(6)]
    bias = dict.fromkeys(circle[:2], 60.0)  # a text of two tokens, whose n-grams come again
    bodies = [
        body("m", circle * n, max_tokens=60, seed=n, temperature=2.0, logit_bias=bias) for n in range(1, 5)
    ]
    assert check_same(Paths(made, made), "ngram", bodies, 1) > 10
