"""Frames come out as they went in, however the bytes between were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.types.errors import KvloomError, QueueFull, Unavailable, WireError
from kvloom.types.request import EndEvent, Event, PromptEvent, TokenEvent, TokenLogprob
from kvloom.types.verbs import FrameEncoder, FrameParser

ids = st.integers(0, 2**31 - 1)
logprobs = st.builds(
    TokenLogprob, st.floats(-100, 0), st.lists(st.tuples(ids, st.floats(-100, 0))).map(tuple)
)
events = st.one_of(
    st.builds(TokenEvent, st.integers(0, 127), ids, ids, st.none() | logprobs),
    st.builds(PromptEvent, st.lists(logprobs, max_size=4)),
    st.builds(
        EndEvent, st.integers(0, 127), st.sampled_from(["stop", "length", "abort", "error"]), st.none() | ids
    ),
)
errors = st.builds(
    QueueFull, st.text(), param=st.none() | st.text(), retry_after=st.none() | st.integers(0, 99)
)


@given(st.lists(st.lists(events, max_size=5) | errors, max_size=6), st.data())
def test_any_chunking_gives_the_same_frames(
    sent: list[list[Event] | KvloomError], data: st.DataObject
) -> None:
    encoder, parser = FrameEncoder(), FrameParser()
    wire = b"".join(encoder.error(f) if isinstance(f, KvloomError) else encoder.events(f) for f in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    got: list[list[Event] | WireError] = []
    for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += parser.feed(wire[begin:end])
    assert got == [f.to_wire() if isinstance(f, KvloomError) else f for f in sent]
    assert parser.whole


def test_half_a_frame_is_not_whole() -> None:
    parser = FrameParser()
    assert parser.feed(FrameEncoder().events([EndEvent(0, "stop")])[:-1]) == []
    assert not parser.whole


@pytest.mark.parametrize("junk", [b"\x00\x00\x00\x01\xc1", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x01\x05"])
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(Unavailable, match="frame"):
        FrameParser().feed(junk)
