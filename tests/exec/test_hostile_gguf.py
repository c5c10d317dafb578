"""GGUF files that are broken, of another kind, or made to break what loads them: each is refused in one line,
before memory is taken for what it announces."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.exec.cpu.executor import load_executor
from kvloom.exec.gguf.architecture import read_config
from kvloom.exec.gguf.header import (
    MOST_ENTRIES,
    MOST_TENSORS,
    MOST_VALUES,
    OTHERS,
    SERVED,
    read_header,
)
from kvloom.exec.gguf.tokenizer import read_tokenizer
from kvloom.exec.parallel.group import RankGroup, connect
from kvloom.types.errors import ConfigError, Unavailable
from tests.engines import spec_of
from tests.exec.loading import load, refusal
from tests.ggufs import make_gguf

MIB = 1 << 20
U64 = st.one_of(
    st.integers(0, 99), st.integers(0, (1 << 64) - 1), st.sampled_from((1 << 31, 1 << 32, 1 << 63))
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("whole"), "qwen3", Type.Q8_0, num_hidden_layers=1)[0]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def headed(values: bytes = b"", count: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    """A file that begins so. values: `count` of them, and what follows."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + values


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def record(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def put(folder: Path, data: bytes) -> Path:
    (folder / "bad.gguf").write_bytes(data)
    return folder / "bad.gguf"


# -- headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not begin as a GGUF file does"),
        (b"GG", "does not begin as a GGUF file does"),
        (b"PK\3\4" + bytes(99), "does not begin as a GGUF file does"),
        (b"GGUF", "is cut short"),
        (headed(version=1), "has version 1; a little-endian file of version 2 or 3 is right"),
        (headed(version=3 << 24), "is of a big-endian machine"),
        (headed(), "does not say its general.architecture"),
        (headed(count=1 << 60), f"announces {1 << 60:,} values; {MOST_VALUES:,} at most are right"),
        (headed(tensors=1 << 60), f"announces {1 << 60:,} tensors; {MOST_TENSORS:,} at most are right"),
        (headed(struct.pack("<Q", 1 << 62), 1), "announces 4,611,686,018,427,387,904 bytes of a text"),
        (headed(struct.pack("<Q", 900), 1), "cut short: its header wants 900 bytes at 32"),
        (headed(text("a") + struct.pack("<I", 77), 1), "a has a value of an unknown type, 77"),
        (headed(text("a") + struct.pack("<IIQ", 9, 9, 3), 1), "a has a value of an unknown type, 9"),
        (headed(text("a") + struct.pack("<IIQ", 9, 8, 1 << 50), 1), f"{MOST_ENTRIES:,} at most are right"),
        (headed(text("a") + struct.pack("<IIQ", 9, 8, MOST_ENTRIES), 1), "cut short"),
        (headed(text("a") + struct.pack("<IIQ", 9, 12, MOST_ENTRIES), 1), "cut short"),
        (headed(text("a") + struct.pack("<IQ", 8, 1) + b"\xff", 1), "a text that is no UTF-8"),
        (headed(text("a\nb"), 1), "has a name that cannot be printed, before 35"),
        (headed(ARCHITECTURE + ARCHITECTURE, 2), "has general.architecture twice"),
        (headed(ARCHITECTURE, 1, tensors=1), "cut short"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_its_file(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in refusal(put(tmp_path, data))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record("x", (), 0)], "x has 0 dimensions; 1 to 4 are right"),
        ([record("x", (1, 1, 1, 1, 1), 0)], "x has 5 dimensions"),
        ([record("x", (0, 4), 0)], "x has the shape [0, 4], which cannot be"),
        ([record("x", (1 << 40, 1 << 40), 0)], "which cannot be"),
        ([record("x", (4, 33), 8)], "a row of Q8_0 has a multiple of 32 numbers"),
        ([record("x", (4, 4), 77)], "x is of the type 77, which is unknown, which is not served"),
        ([record("x", (8,), 0, 7)], "x lies at 7, which is no multiple of 32"),
        ([record("x", (1 << 30, 32), 0)], "cut short: its x ends at"),
        ([record("x", (8,), 0, 1 << 62)], "cut short: its x ends at"),
        ([record("x", (8,), 0), record("x", (8,), 0, 32)], "has x twice"),
        ([record("x", (16,), 0), record("y", (8,), 0, 32)], "y lies over another tensor"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, records: list[bytes], said: str) -> None:
    data = headed(ARCHITECTURE + b"".join(records), 1, len(records)) + bytes(200)
    assert said in refusal(put(tmp_path, data))


@pytest.mark.parametrize("kind", sorted(OTHERS), ids=OTHERS.__getitem__)
def test_types_that_are_not_served(tmp_path: Path, kind: int) -> None:
    data = headed(ARCHITECTURE + record("x", (1, 256), kind), 1, 1) + bytes(4096)
    said = refusal(put(tmp_path, data))
    assert f"x is of the type {OTHERS[kind]}, which is not served; F32, F16" in said


def test_types_are_the_format_s_own() -> None:
    known = {one.value: one.name for one in Type}
    assert {kind: one.name for kind, one in SERVED.items()} | dict(OTHERS) == known
    sizes = {kind: (one.block, one.size) for kind, one in SERVED.items()}
    assert sizes == {kind: gguf.GGML_QUANT_SIZES[Type(kind)] for kind in SERVED}


@pytest.mark.parametrize("alignment", [0, 3, 1 << 30])
def test_an_alignment_that_is_none(tmp_path: Path, alignment: int) -> None:
    value = text("general.alignment") + struct.pack("<II", 4, alignment)
    data = headed(ARCHITECTURE + value + record("x", (8,), 0), 2, 1) + bytes(200)
    assert f"general.alignment is {alignment}; a power of two is right" in refusal(put(tmp_path, data))


@given(count=U64, tensors=U64, length=U64, kind=st.integers(0, 13), entries=U64)
def test_no_memory_is_taken_for_what_a_header_announces(
    tmp_path_factory: pytest.TempPathFactory, count: int, tensors: int, length: int, kind: int, entries: int
) -> None:
    values = ARCHITECTURE + text("a") + struct.pack("<IIQ", 9, kind, entries) + struct.pack("<Q", length)
    file = put(tmp_path_factory.mktemp("bad"), headed(values, count, tensors))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@given(part=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short(whole: Path, part: float) -> None:
    data = whole.read_bytes()
    file = put(whole.parent, data[: int(part * len(data))])
    with pytest.raises(ConfigError, match=r"cut short|does not begin as"):
        read_header(file)


@settings(max_examples=200)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_a_header_with_other_bytes_is_read_or_refused(whole: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(whole.read_bytes())
    end = min(one.offset for one in read_header(whole).tensors.values())
    for part, byte in changes:
        data[int(part * end)] = byte
    assert "\n" not in said_of(put(whole.parent, bytes(data)))


def said_of(file: Path) -> str:
    """Why it is refused, or nothing."""
    try:
        header = read_header(file)
        read_config(header)
        read_tokenizer(header)
    except ConfigError as error:
        return error.message
    return ""


# -- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"general.architecture": None}, "does not say its general.architecture"),
        ({"split.count": 3}, "is one of 3 parts of a model; one file that holds all is right"),
        ({"qwen3.block_count": None}, "qwen3.block_count is missing"),
        ({"qwen3.block_count": 2}, "its file lacks model.layers.1."),
        ({"qwen3.block_count": 1 << 31}, "qwen3.block_count is 2,147,483,648; a number from 1 to"),
        ({"qwen3.block_count": "many"}, "qwen3.block_count is no whole number"),
        ({"qwen3.embedding_length": 96}, "embedding_length is 96, and its token_embd.weight has rows of 64"),
        ({"qwen3.feed_forward_length": 1 << 20}, "has the shape [64, 96]; [64, 1048576] is right"),
        ({"qwen3.attention.head_count": 1 << 20}, "from 1 to 65,536 is right"),
        ({"qwen3.attention.head_count_kv": [1, 2]}, "head_count_kv is no whole number"),
        ({"qwen3.attention.key_length": 32}, "rotated in part"),
        ({"qwen3.attention.sliding_window": 32}, "sliding_window is not served"),
        ({"qwen3.logit_scale": 2.0}, "its qwen3.logit_scale is not served; a model without it is right"),
        ({"qwen3.expert_count": 8}, "it is a mixture of experts"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not served"),
        ({"qwen3.attention.layer_norm_rms_epsilon": float("nan")}, "is not one finite number"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id is 320, and its vocabulary has 320 tokens"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer; 'gpt2' or 'llama' is right"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind 'bert'; 'gpt2' or 'llama' is right"),
        ({"tokenizer.ggml.pre": "nobody"}, "tokenizer.ggml.pre, how texts are split, is 'nobody'; gpt-2"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre, how texts are split, is missing"),
        ({"tokenizer.ggml.tokens": None}, "its vocabulary has 0 tokens"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is no list of texts"),
        ({"tokenizer.ggml.tokens": ["a"] * 321}, "its vocabulary has 321 tokens, and its embedding 320"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries, and its vocabulary 320"),
        ({"tokenizer.ggml.merges": None}, "neither merges nor scores"),
        ({"tokenizer.ggml.merges": ["the weaver"]}, "the merge 'the weaver', which is no pair of its tokens"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is no text"),
        ({"general.sampling.temp": -1.0}, "its general.sampling"),
    ],
)  # fmt: skip
def test_values_that_are_not_served(tmp_path: Path, extra: dict[str, Any], said: str) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", Type.Q8_0, extra=extra, num_hidden_layers=1)
    if "general.architecture" in extra:
        file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectura"))
    assert said in refusal(file)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"expert_count": 3}, "has the shape [4, 96, 64]; [3, 96, 64] is right by its config"),
        ({"expert_count": 1 << 20}, "llama.expert_count is 1,048,576; a number from 1 to 4,096 is right"),
        ({"expert_used_count": 5}, "llama.expert_used_count is 5; a number from 1 to 4 is right"),
        ({"expert_used_count": None}, "llama.expert_used_count is missing; a number from 1 to 4 is right"),
        ({"expert_gating_func": 2}, "its llama.expert_gating_func is not served; softmax is right"),
        ({"expert_shared_count": 1}, "its llama.expert_shared_count is not served"),
        ({"expert_count": None}, "its file lacks model.layers.0.mlp.down_proj.weight and 2 more"),
    ],
)
def test_mixtures_that_are_not_served(tmp_path: Path, extra: dict[str, Any], said: str) -> None:
    values = {f"llama.{key}": value for key, value in extra.items()}
    file, _ = make_gguf(tmp_path, "mixtral", Type.Q8_0, extra=values, num_hidden_layers=1)
    assert said in refusal(file)


def test_a_mixture_of_which_a_half_is_missing(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "mixtral", Type.Q8_0, num_hidden_layers=1)
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_up_exps.weight", b"blk.0.attn_q_norm.weight"))
    assert "its file has blk.0.ffn_gate_exps.weight, and lacks ffn_up_exps beside it" in refusal(file)


def test_no_room_for_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = make_gguf(tmp_path, "mixtral", Type.Q4_0, num_hidden_layers=1)
    experts = 4 * 3 * 64 * 96 * (16 + 4) // 32  # bytes of codes, scales and offsets
    monkeypatch.setattr("kvloom.exec.cpu.executor.available_memory", lambda: experts)
    assert f"bytes of memory, and {experts:,} are available here" in refusal(file, dtype="bfloat16")


def test_an_expert_that_has_an_infinite_scale(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "mixtral", Type.Q4_0, num_hidden_layers=1)
    record = read_header(file).tensors["blk.0.ffn_up_exps.weight"]
    with file.open("r+b") as opened:
        opened.seek(record.offset + 3 * record.nbytes // 4)
        opened.write(np.array(np.inf, np.float16).tobytes())
    assert "blk.0.ffn_up_exps.weight[3]: a scale or an offset is infinite" in refusal(file)


def test_another_architecture(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", Type.Q8_0)
    file.write_bytes(file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0qwen3", b"\x05\0\0\0\0\0\0\0rwkv6", 1))
    said = refusal(file)
    assert "its architecture is 'rwkv6'; GGUF files of llama, qwen2, qwen3, qwen3moe are served" in said


def test_a_tensor_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", Type.Q8_0, tensors={"blk.0.extra.weight": np.zeros(4, np.float32)})
    assert "its blk.0.extra.weight is no tensor of the architectures that are served" in refusal(file)


def test_a_tensor_of_a_layer_that_is_not_there(tmp_path: Path) -> None:
    file, _ = make_gguf(
        tmp_path, "qwen3", Type.Q8_0, tensors={"blk.9.attn_norm.weight": np.zeros(64, np.float32)}
    )
    assert "blk.9.attn_norm.weight has the shape [64]; none is right by its config" in refusal(file)


def test_rotary_factors_that_do_not_fit(tmp_path: Path) -> None:
    file, _ = make_gguf(tmp_path, "llama", Type.Q8_0, tensors={"rope_freqs.weight": np.ones(3, np.float32)})
    assert "rope_freqs.weight has the shape [3]; [8] is right" in refusal(file)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight", "output.weight"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_scale_that_is_infinite(tmp_path: Path, name: str, bad: float) -> None:
    file, _ = make_gguf(tmp_path, "qwen3", Type.Q8_0)
    data = bytearray(file.read_bytes())
    at = read_header(file).tensors[name].offset + 34
    data[at : at + 2] = struct.pack("<e", bad)
    file.write_bytes(data)
    assert f"{name}: a scale or an offset is infinite or no number; finite ones are right" in refusal(file)


def test_no_file(tmp_path: Path) -> None:
    assert "does not exist, or is no file; a GGUF file is right" in refusal(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "config.json" in refusal(tmp_path / "folder.gguf")


def test_another_digest(whole: Path) -> None:
    assert f"and {'ab' * 32} is wanted" in refusal(whole, sha256="ab" * 32)


def test_no_room(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.exec.cpu.executor.available_memory", lambda: 1000)
    assert "and 1,000 are available here" in refusal(whole)


def test_ranks_do_not_share_one(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"models\.m: .* in a GGUF file, and ranks share neither; a `tensor_parallel`"
    ):
        load_executor(spec_of({"m": whole}, tensor_parallel=2), tmp_path)


def test_a_rank_that_refuses_before_the_first_has_met_it_says_why(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(store: str, rank: int, size: int, slots: int, device: torch.device) -> RankGroup:
        connect(store, rank, size, slots, device)
        raise Unavailable("the connection was closed by its peer")

    monkeypatch.setattr("kvloom.exec.parallel.ranks.connect", cut)
    with pytest.raises(ConfigError, match=r"models\.m: .* ranks share neither"):
        load_executor(spec_of({"m": whole}, tensor_parallel=2), tmp_path)


def test_a_good_one_is_served(whole: Path) -> None:
    assert load(whole).geometry.layers == 1
