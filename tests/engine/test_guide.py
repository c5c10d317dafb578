"""Guided decoding over a small byte-level vocabulary, narrower than the logits."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from time import thread_time

import numpy as np
import pytest
from llguidance import LLParserLimits
from msgspec.structs import replace

from kvloom.engine.engine import Engine
from kvloom.engine.guide import GuideCompiler, GuideState
from kvloom.types.errors import BadRequest, Unavailable
from kvloom.types.request import Guide, Made
from tests.api.scripted import EOS, byte_level, card, token, tokens
from tests.engine.plays import order, serve
from tests.engines import Answer
from tests.modelled import VOCAB as MODELLED_VOCAB
from tests.modelled import ModelledExecutor, ask, engine_over, expected, modelled, turns
from tests.processes import DEADLINE

VOCAB = 371  # not a multiple of 32, and more than the tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["fox", "hello"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


AMBIGUOUS = Guide("lark", 'start: e\ne: e e e| "x" | e "x" e')


@pytest.fixture(scope="module")
def compiler() -> GuideCompiler:
    return GuideCompiler(card(vocab_size=VOCAB))


def allowed(state: GuideState) -> list[int]:
    mask = state.mask()
    assert mask.dtype == np.uint32
    assert len(mask) == -(-VOCAB // 32)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(one) for one in np.flatnonzero(bits)]


def play(state: GuideState, text: str) -> None:
    for one in tokens(text):
        assert one in allowed(state)
        assert state.accepts(one)


def test_json_schema_to_its_end(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("json_schema", json.dumps(SCHEMA)))
    assert token(EOS) not in allowed(state)
    play(state, '{"a": 12, "b": "fox"')
    assert not state.done
    assert token(EOS) not in allowed(state)
    play(state, "}")
    assert state.done
    assert allowed(state) == [token(EOS)]
    assert state.accepts(token(EOS))


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_end_in_what_the_schema_says(compiler: GuideCompiler, seed: int) -> None:
    draw = random.Random(seed)
    state = compiler.start(Guide("json_schema", json.dumps(SCHEMA)))
    made: list[int] = []
    while token(EOS) not in (choices := allowed(state)):
        assert max(choices) < byte_level().get_vocab_size()
        closing = [one for one in choices if byte_level().decode([one]).strip() in (",", "}", '"')]
        made.append(draw.choice(closing if closing and len(made) > 20 else choices))
        assert state.accepts(made[-1])
    value = json.loads(byte_level().decode(made))
    assert isinstance(value["a"], int)
    assert value["b"] in ("fox", "hello")


def test_a_grammar_that_may_end_or_go_on(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("regex", "ab*"))
    play(state, "a")
    assert set(allowed(state)) == {token(EOS), token("b")}
    assert not state.done


def test_lark_with_a_special_token(compiler: GuideCompiler) -> None:
    mark = token("[TOOL_CALLS]")
    state = compiler.start(Guide("lark", f'start: <[{mark}]> "x"'))
    assert allowed(state) == [mark]
    assert state.accepts(mark)
    play(state, "x")
    assert state.done


def test_any_object(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("json"))
    assert {byte_level().decode([one])[:1] for one in allowed(state)} == {"{"}
    play(state, '{"x": [1, {"y": null}]}')
    assert token(EOS) in allowed(state)


@pytest.mark.parametrize("guide", [Guide("json"), Guide("json_schema", json.dumps(SCHEMA))])
def test_space_cannot_go_on_for_ever(compiler: GuideCompiler, guide: Guide) -> None:
    state = compiler.start(guide)
    for so_far in ("{", '"a": ', "12", ', "b": ', '"fox"'):
        play(state, so_far)
        assert not {token(space) for space in ("Ġ", "Ċ", "ĉ")} & set(allowed(state))
    play(state, "}")


@pytest.mark.parametrize("text", ['{"a": 1, "b": "fox"}', '{"a":1,"b":"fox"}'])
def test_json_with_and_without_spaces(compiler: GuideCompiler, text: str) -> None:
    state = compiler.start(Guide("json_schema", json.dumps(SCHEMA)))
    play(state, text)
    assert state.done


def test_a_forbidden_token_is_no_step(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("regex", "ab"))
    assert not state.accepts(token("z"))


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json_schema", '{"type": "objec"}'),
        Guide("json_schema", "{"),
        Guide("regex", "(a"),
        Guide("lark", "start: nowhere"),
    ],
)
def test_what_is_no_grammar_is_a_bad_request(compiler: GuideCompiler, guide: Guide) -> None:
    with pytest.raises(BadRequest, match="cannot be used") as refused:
        compiler.start(replace(guide, param="guided_regex"))
    assert refused.value.param == "guided_regex"


def test_vocabulary_narrower_than_the_tokenizer() -> None:
    state = GuideCompiler(card(vocab_size=300)).start(Guide("regex", "[a-z]+"))
    assert len(state.mask()) == 10
    assert state.accepts(token("a"))
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
    assert not bits[300:].any()


def test_a_matcher_that_gives_up_has_not_ended_the_grammar(compiler: GuideCompiler) -> None:
    """Law 3: half an answer is no answer. The pattern compiles, and grows too large on the way."""
    schema = {"type": "string", "pattern": "(.*a.{0,100}){1,30}"}
    state = compiler.start(Guide("json_schema", json.dumps(schema)))
    taken = 0
    for one in tokens('"' + "ab" * 200):
        if not state.accepts(one):
            break
        taken += 1
    else:
        pytest.fail("the matcher did not give up: the test needs a larger pattern")
    assert taken > 2
    assert not state.done
    assert not state.accepts(token(EOS))
    assert not allowed(state)


def test_eos_ends_a_grammar_whoever_ignores_it(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("regex", "a*"))
    assert state.accepts(token("a"))
    assert not state.done
    assert state.accepts(token(EOS))
    assert state.done
    assert state.taken == 2


def test_choices_step_apart(compiler: GuideCompiler) -> None:
    one = compiler.start(Guide("regex", "ab|ba"))
    [two] = one.copies(1)
    assert one.accepts(token("a"))
    assert two.accepts(token("b"))
    assert not two.accepts(token("b"))
    assert one.accepts(token("b"))


@pytest.mark.parametrize(
    ("guide", "text", "why"),
    [
        (Guide("lark", 'start: "a" "b" Y\nY: /[a-z]+/ & /[0-9]+/'), "ab", "it allows no token here"),
        (
            Guide("json_schema", json.dumps({"type": "string", "pattern": "(.*a.{0,100}){1,30}"})),
            '"' + "ab" * 200,
            "takes more work than is allowed: lexer error",
        ),
    ],
    ids=["no token midway", "too much work for a mask"],
)
def test_a_guide_that_cannot_go_on_says_why(
    compiler: GuideCompiler, guide: Guide, text: str, why: str
) -> None:
    state = compiler.start(guide)
    assert not state.problem
    for one in tokens(text):
        if not (state.mask().any() and state.accepts(one)):
            break
    assert not state.mask().any()
    assert not state.done
    assert why in state.problem


def test_a_step_has_a_budget(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.engine.guide.LIMITS", LLParserLimits(step_max_items=100))
    state = compiler.start(AMBIGUOUS)
    taken = sum(bool(state.mask().any() and state.accepts(one)) for one in tokens("x" * 100))
    assert 0 < taken < 100
    assert "takes more work than is allowed" in state.problem


def test_tokens_have_a_budget_together(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that keeps little may still work for long over each token."""
    monkeypatch.setattr("kvloom.engine.guide.CREDIT_SECONDS", 0.0)
    monkeypatch.setattr("kvloom.engine.guide.TOKEN_SECONDS", 1e-5)
    state = compiler.start(AMBIGUOUS)
    taken = sum(bool(state.mask().any() and state.accepts(one)) for one in tokens("x" * 100))
    assert taken < 100
    assert "more work than is allowed, 0.01 ms each" in state.problem


def test_a_refused_token_is_no_problem_of_the_guide(compiler: GuideCompiler) -> None:
    state = compiler.start(Guide("regex", "ab"))
    assert not state.accepts(token("z"))
    assert not state.problem
    play(state, "ab")


class _NoToken:
    """A grammar that has nothing to say."""

    done = False
    problem = ""
    taken = 0

    def mask(self) -> None:
        return None

    def accepts(self, token: int) -> bool:
        return False

    def copies(self, count: int) -> list[_NoToken]:
        return [self] * count


class _GaveUp(_NoToken):
    problem = "it allows no token here"


class _Unguided(_NoToken):
    def accepts(self, token: int) -> bool:
        return True


@pytest.mark.parametrize(("state", "code"), [(_NoToken(), ""), (_GaveUp(), "guide_failed")])
def test_a_guide_that_refuses_its_token_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, state: _NoToken, code: str
) -> None:
    """If the guide gave up, that is the request's doing, and its end says so."""
    monkeypatch.setattr(GuideCompiler, "start", lambda self, guide: state)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        guided = order("guided", "wide", 9, guide=Guide("json", param="guided_json"))
        plain = order("plain", "wide", 12)
        ended, answer = await asyncio.gather(ask(engine, guided), ask(engine, plain))
        assert (ended.ends[0].reason, ended.ends[0].code) == ("error", code)
        assert bool(code) == ended.ends[0].message.startswith("guided_json: after 0 tokens it allows no")
        assert ended.ends[0].param == ("guided_json" if code else "")
        assert not ended.tokens
        assert answer.tokens == expected(executor, plain)

    serve(play(), engine, executor)


def test_a_guide_ready_after_the_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    def slow(compiler: GuideCompiler, guide: Guide) -> _NoToken:
        assert ready.wait(DEADLINE)
        return _NoToken()

    monkeypatch.setattr(GuideCompiler, "start", slow)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        asking = asyncio.create_task(ask(engine, order("guided", "wide", 9, guide=Guide("json"))))
        await turns()
        engine.stop()
        await turns()
        ready.set()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(asking, DEADLINE)

    async def whole() -> None:
        async with modelled(engine, executor):
            await play()

    asyncio.run(whole())


@pytest.mark.parametrize("hurry", [True, False], ids=["compiling", "in the queue to compile"])
def test_an_abort_while_a_guide_compiles_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    """All of it or one choice; its id is free at once, and what nobody wants any more is not compiled."""
    ready, compiled, loop = threading.Event(), list[str](), threading.get_ident()

    def slow(compiler: GuideCompiler, guide: Guide) -> _Unguided:
        if threading.get_ident() != loop:  # The oracle, which compares on the loop, compiles too.
            compiled.append(guide.text)
            assert ready.wait(DEADLINE)
        return _Unguided()

    monkeypatch.setattr(GuideCompiler, "start", slow)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        gone, part = order("gone", "wide", 9, guide=Guide("regex", "a")), order("part", "wide", 9, n=3)
        part = replace(part, sampling=replace(part.sampling, guide=Guide("regex", "b")))
        orders = [gone, part] if hurry else [part, gone]
        asking = {body.request: asyncio.create_task(ask(engine, body)) for body in orders}
        await turns()
        await engine.abort("gone")
        await engine.abort("part", 0)
        await engine.abort("part", 2)
        again = order("gone", "wide", 12)
        assert (await ask(engine, again)).tokens == expected(executor, again)
        assert not any(task.done() for task in asking.values())
        jobs = len(executor.jobs)
        ready.set()
        answer = await asking["gone"]
        assert answer.ends[0].reason == "abort"
        assert not answer.tokens
        answer = await asking["part"]
        assert [answer.ends[choice].reason for choice in range(3)] == ["abort", "length", "abort"]
        assert answer.tokens == {1: expected(executor, part)[1]}
        assert len(executor.jobs) > jobs
        assert compiled == (["a", "b"] if hurry else ["b"])

    async def whole() -> None:
        async with modelled(engine, executor):
            await play()

    asyncio.run(whole())


class _CountingMatcher:
    """A grammar of any text that counts the tokens, and does something over each."""

    def __init__(self, consume: Callable[[int], object]) -> None:
        self._consume = consume
        self.count = 0

    def deep_copy(self) -> _CountingMatcher:
        return self

    def is_stopped(self) -> bool:
        return False

    is_error = is_accepting = is_stopped

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 128

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.count += 1
        self._consume(self.count)
        return 1


def counted(consume: Callable[[int], object]) -> GuideState:
    return GuideState(_CountingMatcher(consume), MODELLED_VOCAB, ())


def burn(seconds: float) -> None:
    until = thread_time() + seconds
    while thread_time() < until:
        pass


def test_cheap_tokens_save_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.engine.guide.CREDIT_SECONDS", 0.02)
    monkeypatch.setattr("kvloom.engine.guide.TOKEN_SECONDS", 0.001)
    state = counted(lambda count: burn(0.01 if count > 100 else 0.0))
    while state.accepts(1):
        pass
    assert 100 < state.taken <= 103
    assert "more work than is allowed, 1 ms each" in state.problem


def play_beside_threads(
    play: Coroutine[None, None, None], engine: Engine, executor: ModelledExecutor
) -> None:
    """A loop on which nothing can happen until a thread has done its work is no deadlock."""

    async def whole() -> None:
        async with modelled(engine, executor), asyncio.timeout(DEADLINE):
            await play

    asyncio.run(whole())


def test_long_replays_leave_the_loop_free_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.engine.guide.RETRACE_SECONDS", 0.0)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)
    home, steps = threading.get_ident(), list[str]()

    async def nothing() -> None:
        await asyncio.sleep(0)

    def start(loop: asyncio.AbstractEventLoop, guide: Guide) -> GuideState:
        def consume(count: int) -> None:
            if count <= 40:  # made elsewhere
                assert threading.get_ident() != home
                # or else the loop stands still
                asyncio.run_coroutine_threadsafe(nothing(), loop).result(DEADLINE)
                steps.append(guide.text)

        return counted(consume)

    async def play() -> None:
        loop = asyncio.get_running_loop()
        whole = {name: expected(executor, order(name, "wide", 9, max_tokens=48)) for name in ("a", "b")}
        monkeypatch.setattr(GuideCompiler, "start", lambda self, guide: start(loop, guide))

        async def go_on(name: str) -> None:
            moved = order(name, "wide", 9, max_tokens=48, guide=Guide("regex", name))
            answer = Answer(tokens={0: whole[name][0][:40]})
            async for frame in engine.start_generate(replace(moved, made=[Made(0, whole[name][0][:40])])):
                answer.take(frame)
            assert answer.tokens == whole[name]
            assert answer.ends[0].reason == "length"

        await asyncio.gather(go_on("a"), go_on("b"))
        turn = steps.index("b" if steps[0] == "a" else "a")
        both = steps[turn : turn + 2 * (40 - turn)]
        assert all(one != other for one, other in pairwise(both))

    play_beside_threads(play(), engine, executor)


def test_a_replay_over_its_budget_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.engine.guide.CREDIT_SECONDS", 1e-9)
    monkeypatch.setattr("kvloom.engine.guide.TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(GuideCompiler, "start", lambda self, guide: counted(burn))
    executor = ModelledExecutor(100)
    engine = engine_over(executor)

    async def play() -> None:
        moved = order("moved", "wide", 9, max_tokens=48, guide=Guide("json", param="guided_json"))
        moved, plain = replace(moved, made=[Made(0, [1] * 40)]), order("plain", "wide", 12)
        ended, answer = await asyncio.gather(ask(engine, moved), ask(engine, plain))
        assert (ended.ends[0].reason, ended.ends[0].code) == ("error", "guide_failed")
        assert ended.ends[0].message.startswith("guided_json: after 1 tokens its tokens take more work")
        assert ended.ends[0].param == "guided_json"
        assert not ended.tokens
        assert answer.tokens == expected(executor, plain)

    play_beside_threads(play(), engine, executor)


def test_a_replay_that_nobody_wants_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.engine.guide.RETRACE_SECONDS", 0.0)
    executor = ModelledExecutor(100)
    engine = engine_over(executor)
    matchers = list[_CountingMatcher]()

    async def play() -> None:
        loop = asyncio.get_running_loop()

        def abort_at_five(count: int) -> None:
            if count == 5:
                asyncio.run_coroutine_threadsafe(engine.abort("moved"), loop).result(DEADLINE)

        def start(compiler: GuideCompiler, guide: Guide) -> GuideState:
            matchers.append(_CountingMatcher(abort_at_five))
            return GuideState(matchers[-1], MODELLED_VOCAB, ())

        monkeypatch.setattr(GuideCompiler, "start", start)
        moved = order("moved", "wide", 9, max_tokens=48, guide=Guide("json"))
        answer = await ask(engine, replace(moved, made=[Made(0, [1] * 40)]))
        assert answer.ends[0].reason == "abort"
        assert [matcher.count for matcher in matchers] == [5]

    play_beside_threads(play(), engine, executor)
