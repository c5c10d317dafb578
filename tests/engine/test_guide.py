"""Guided decoding over a small byte-level vocabulary, narrower than the logits."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from msgspec.structs import replace

from kvloom.engine.guide import GuideCompiler, GuideState
from kvloom.types.errors import BadRequest
from kvloom.types.request import Guide
from tests.api.scripted import EOS, byte_level, card, token, tokens

VOCAB = 371  # not a multiple of 32, and more than the tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["fox", "hello"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


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


def test_choices_step_apart(compiler: GuideCompiler) -> None:
    one = compiler.start(Guide("regex", "ab|ba"))
    two = one.copy()
    assert one.accepts(token("a"))
    assert two.accepts(token("b"))
    assert not two.accepts(token("b"))
    assert one.accepts(token("b"))
