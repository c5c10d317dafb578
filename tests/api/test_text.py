"""Stop strings and detokenizing: how a text is cut up changes nothing."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from kvloom.api.catalog import Catalog, ServedModel
from kvloom.api.generation.text import StopStrings, detokenizer
from kvloom.api.texts.prompts import SHORT, PlainPrompt
from kvloom.api.tokenizer import Tokenizer
from kvloom.types.errors import BadRequest
from kvloom.types.request import ModelCard
from tests.api.scripted import UNTIMED, ScriptedEngine, byte_level, card, says, token, tokens


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(st.text(alphabet="abc ", max_size=30))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    return text, [text[begin:end] for begin, end in pairwise(cuts)]


def run(stops: StopStrings, pieces: list[str]) -> str:
    shown = [stops.push(piece) for piece in pieces]
    return "".join(shown) + stops.end()


@UNTIMED
@given(cut_texts(), st.lists(st.text(alphabet="abc ", min_size=1, max_size=5), max_size=4))
def test_stops_do_not_see_where_a_text_is_cut(cut: tuple[str, list[str]], words: list[str]) -> None:
    text, pieces = cut
    stops = StopStrings(words)
    shown = run(stops, pieces)
    assert shown == run(StopStrings(words), list(text))
    ends = [text.find(word) + len(word) for word in words if word in text]
    if not ends:
        assert shown == text
        assert stops.hit is None
    else:
        assert stops.hit is not None
        assert text.startswith(shown + stops.hit)
        assert len(shown + stops.hit) == min(ends)


@UNTIMED
@given(cut_texts())
def test_stops_hold_back_no_more_than_could_become_one(cut: tuple[str, list[str]]) -> None:
    stops = StopStrings(["abca"])
    shown = ""
    seen = ""
    for piece in cut[1]:
        seen += piece
        shown += stops.push(piece)
        if stops.hit is None:
            held = seen[len(shown) :]
            assert held in ("", "a", "ab", "abc")


def sentencepiece() -> Tokenizer:
    """Bytes and a few words, as Llama 2 spells them."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁hello", "▁world", "fox", "é"]
    hf = HFTokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    hf.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(hf.to_str())


def words() -> Tokenizer:
    """A vocabulary of whole words: only its decoder knows about the spaces between them."""
    hf = HFTokenizer(
        models.WordPiece({"un": 0, "##do": 1, "the": 2, "fox": 3, "[UNK]": 4}, unk_token="[UNK]")
    )
    hf.decoder = decoders.WordPiece()
    return Tokenizer(hf.to_str())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = detokenizer(tokenizer)
    return "".join([text.push(one) for one in ids]) + text.end()


TINY = Tokenizer(byte_level().to_str())
PIECES = sentencepiece()
WORDS = words()


@UNTIMED
@given(st.text(max_size=40))
def test_streamed_text_is_the_text(text: str) -> None:
    assert streamed(TINY, tokens(text)) == text


@UNTIMED
@given(st.lists(st.integers(0, 400), max_size=40))
def test_any_tokens_at_all(ids: list[int]) -> None:
    """Broken UTF-8, special tokens and ids beyond the vocabulary included."""
    assert streamed(TINY, ids) == TINY.decode(ids)


@UNTIMED
@given(st.lists(st.sampled_from([256, 257, 258, 259, 260, *b"a\n"]), max_size=20))
def test_sentencepiece(ids: list[int]) -> None:
    assert streamed(PIECES, ids) == PIECES.decode(ids)


@UNTIMED
@given(st.lists(st.integers(0, 255), max_size=20))
def test_sentencepiece_bytes_never_raise(ids: list[int]) -> None:
    assert streamed(PIECES, ids) == bytes(ids).decode("utf-8", "replace")


@UNTIMED
@given(st.lists(st.integers(0, 3), max_size=20))
def test_a_vocabulary_whose_decoder_adds_spaces(ids: list[int]) -> None:
    assert streamed(WORDS, ids) == WORDS.decode(ids)


def test_half_a_character_waits() -> None:
    text = detokenizer(TINY)
    *begin, last = tokens("🦊")
    assert [text.push(one) for one in begin] == [""] * len(begin)
    assert text.push(last) == "🦊"


def test_special_tokens_show_where_they_are_kept() -> None:
    mark = token("[TOOL_CALLS]")
    assert detokenizer(TINY).push(mark) == ""
    assert detokenizer(TINY, frozenset({mark})).push(mark) == "[TOOL_CALLS]"


def served(*cards: ModelCard) -> list[ServedModel]:
    return asyncio.run(Catalog(ScriptedEngine(says(""), cards=list(cards))).models())


def encoded(model: ServedModel, text: str) -> list[int]:
    return asyncio.run(model.tokens(PlainPrompt(text)))


def test_encoding() -> None:
    (tiny,) = served(card(context_length=1 << 20))
    assert encoded(tiny, "hello") == [token("<s>"), *tokens("hello")]
    assert encoded(tiny, "<s>hello") == [token("<s>"), *tokens("hello")]
    assert encoded(tiny, "") == [token("<s>")]
    long = "hello " * SHORT
    assert encoded(tiny, long) == [token("<s>"), *tokens(long)]


def test_nothing_to_begin_with() -> None:
    (bare,) = served(card(bos_token_id=None, add_bos=False))
    with pytest.raises(BadRequest, match="prompt is empty and model tiny"):
        encoded(bare, "")


def test_models_with_equal_tokenizers_share_one_but_begin_as_each_does() -> None:
    wire = msgspec.msgpack.encode([card("a"), card("b", add_bos=False, bos_token_id=None)])
    one, other = served(*msgspec.msgpack.decode(wire, type=list[ModelCard]))
    assert one.tokenizer is other.tokenizer
    assert one.card.tokenizer is other.card.tokenizer
    assert encoded(one, "hello") == [token("<s>"), *tokens("hello")]
    assert encoded(other, "hello") == tokens("hello")
