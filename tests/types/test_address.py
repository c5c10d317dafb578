"""Addresses of blocks: nothing is lost on the way, no shorter run list says the same, and none that is not
whole is believed."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvloom.types.address import Endpoint, KVAddress, KVForm, Ticket, resolve
from kvloom.types.errors import BadRequest
from kvloom.types.geometry import Geometry

_FORM = KVForm(layers=2, kv_heads=3, head_dim=8, dtype="float32", block_bytes=256, tokens_per_block=4)
_EACH = _FORM.layers * _FORM.kv_heads
_PEER = Endpoint(unit="d", kind="modelled", where=b"d/0")


@st.composite
def _addresses(draw: st.DrawFn) -> tuple[KVAddress, list[int]]:
    """An address, and its blocks one by one: now in a row, now anywhere."""
    begin = draw(st.integers(0, 30))
    end = draw(st.integers(begin, begin + 20))
    pages = -(-end // 4) - begin // 4 if end > begin else 0
    ids: list[int] = []
    while len(ids) < pages * _EACH:
        first, length = draw(st.integers(0, 500)), draw(st.integers(1, 15))
        ids += range(first, first + length)
    del ids[pages * _EACH :]
    blocks = np.asarray(ids, dtype=np.int32).reshape(pages, _FORM.layers, _FORM.kv_heads)
    runs = KVAddress.compress(blocks)
    return KVAddress(model="m", form=_FORM, begin=begin, end=end, blocks=runs, ticket=Ticket(1, 1)), ids


@given(made=_addresses())
def test_the_way_there_and_back(made: tuple[KVAddress, list[int]]) -> None:
    address, ids = made
    found = address.block_map
    assert found.dtype == np.int32
    assert found.shape == (address.pages, _FORM.layers, _FORM.kv_heads)
    assert found.ravel().tolist() == ids
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(ids))
    assert len(address.blocks) == 8 * (breaks + 1 if ids else 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=KVAddress) == address


@given(made=_addresses())
def test_its_pages_are_those_that_hold_the_tokens(made: tuple[KVAddress, list[int]]) -> None:
    address, _ = made
    pages = sorted({position // 4 for position in range(address.begin, address.end)})
    assert list(range(address.first_page, address.first_page + address.pages)) == pages or not pages
    assert address.pages == len(pages)


@given(made=_addresses(), by=st.sampled_from([-1, 1, _EACH]))
def test_one_that_is_not_whole_is_refused(made: tuple[KVAddress, list[int]], by: int) -> None:
    address, ids = made
    ids = [*ids, *range(by)] if by > 0 else ids[:by]
    short = structs.replace(address, blocks=np.array([[block, 1] for block in ids], "<i4").tobytes())
    if len(ids) != address.pages * _EACH:
        with pytest.raises(BadRequest, match=f"{len(ids)} blocks for {address.pages} pages of m"):
            _ = short.block_map


@pytest.mark.parametrize("runs", [[[3, 6], [-1, 6]], [[3, 13], [9, -1]], [[3, 12], [9, 0]]])
def test_runs_that_are_none_are_refused(runs: list[list[int]]) -> None:
    ticket = Ticket(1, 1)
    blocks = np.array(runs, "<i4").tobytes()
    address = KVAddress(model="m", form=_FORM, begin=0, end=8, blocks=blocks, ticket=ticket)
    with pytest.raises(BadRequest, match="a run of blocks"):
        _ = address.block_map
    with pytest.raises(BadRequest, match="pairs of int32"):
        _ = structs.replace(address, blocks=blocks[:-1]).block_map


@given(made=_addresses(), prompt=st.lists(st.integers(0, 2**31 - 1), max_size=60), data=st.data())
def test_a_digest_is_of_all_that_decides_what_is_written_where(
    made: tuple[KVAddress, list[int]], prompt: list[int], data: st.DataObject
) -> None:
    address, _ = made
    digest, read = address.digest(prompt, _PEER), prompt[: address.end]
    assert -(2**63) <= digest < 2**63
    for same in (structs.replace(address, ticket=Ticket(2, 9)), msgspec.convert(address, KVAddress)):
        assert same.digest([*read, 5] if len(read) == address.end else prompt, _PEER) == digest
    for change in (
        {"model": "mm"},
        {"begin": address.begin + 1},
        {"blocks": address.blocks + bytes(8)},
        {"blocks": address.blocks[8:] + address.blocks[:8]},
        {"form": structs.replace(_FORM, head_dim=9)},
        {"form": structs.replace(_FORM, dtype="bfloat16")},
    ):
        other = structs.replace(address, **change)
        assert (other == address) == (other.digest(prompt, _PEER) == digest)
    assert structs.replace(address, end=address.end + 1).digest(prompt, _PEER) != digest
    for where in (b"", b"d/1", b"d/00"):
        assert address.digest(prompt, structs.replace(_PEER, where=where)) != digest
    if read:
        at = data.draw(st.integers(0, len(read) - 1))
        for text in (read[:at], [*read[:at], read[at] ^ 1, *read[at + 1 :]], [*read[:at], 0, *read[at:]]):
            assert (text[: address.end] == read) == (address.digest(text, _PEER) == digest)


def test_blocks_are_unpacked_once_and_for_reading() -> None:
    blocks = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    runs = KVAddress.compress(blocks)
    address = KVAddress(model="m", form=_FORM, begin=0, end=8, blocks=runs, ticket=Ticket(1, 1))
    assert address.block_map is address.block_map
    with pytest.raises(ValueError, match="read-only"):
        address.block_map[0] = 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=KVAddress) == address
    longer = structs.replace(address, end=9)
    with pytest.raises(BadRequest, match="12 blocks for 3 pages"):
        _ = longer.block_map


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "scaled", "row", "tokens"),
    [(64, 4, False, 256, 8), (64, 2, False, 128, 16), (64, 1, True, 68, 30), (7, 1, True, 12, 170)],
)
def test_a_row_holds_its_scale(head_dim: int, itemsize: int, scaled: bool, row: int, tokens: int) -> None:
    """At a multiple of its own size; blocks hold as many tokens as fit."""
    geometry = Geometry(2, 3, head_dim, itemsize, 4096, scaled=scaled)
    assert (geometry.row_bytes, geometry.token_bytes, geometry.tokens_per_block) == (row, 2 * row, tokens)
    assert geometry.waste == pytest.approx(1 - tokens * 2 * row / 4096)


def test_forms_differ_by_name() -> None:
    geometry = Geometry(layers=2, kv_heads=3, head_dim=8, itemsize=4, block_bytes=256)
    assert KVForm.of(geometry, "float32") == _FORM
    _FORM.refuse_unlike(_FORM, model="m")
    for change in ({"layers": 3}, {"dtype": "float16"}, {"tokens_per_block": 8}):
        with pytest.raises(BadRequest, match=f"peer's m has {next(iter(change))}"):
            _FORM.refuse_unlike(structs.replace(_FORM, **change), model="m")


@given(length=st.integers(0, 50), position=st.integers(-60, 60))
def test_positions_count_from_either_end(length: int, position: int) -> None:
    if -length <= position <= length:
        assert resolve(position, length, "end") == (position if position >= 0 else length + position)
    else:
        with pytest.raises(BadRequest, match=f"{position} is outside a prompt of {length}"):
            resolve(position, length, "end")
    assert resolve(None, length, "end") == length
