"""Checkpoints that a stranger has made to break what loads them: each is refused in one line, before anything
of the size that it announces is made."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom.exec.checkpoint import CONFIG, INDEX, MOST_CONFIG, MOST_HEADERS, WHOLE, open_checkpoint
from kvloom.exec.loader import check_model
from kvloom.kv.memory import available_memory
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load, reconfigure, refusal

Header = dict[str, Any]
MIB = 1 << 20


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "qwen").mkdir()
    return make_checkpoint(tmp_path / "qwen", "qwen2")


def weights_of(header: Header | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A weight file with this header, and perhaps another length of it than it has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def put(path: Path, header: Header | bytes, data: bytes = b"", length: int | None = None) -> None:
    (path / WHOLE).write_bytes(weights_of(header, data, length))


def index(path: Path, *names: object) -> None:
    """The weights are in the files of these names, says the index."""
    (path / WHOLE).rename(path / "weights.safetensors")
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(enumerate(names))}))


# -- files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "pytorch_model.bin", 7),
        *("..\\x.safetensors", "*.safetensors", ".hidden.safetensors", "x.safetensors\0", INDEX, None),
    ],
)
def test_an_index_that_points_elsewhere(qwen: Path, name: object) -> None:
    index(qwen, "weights.safetensors", name)
    assert INDEX in refusal(qwen)


def test_an_index_in_its_folder(qwen: Path) -> None:
    index(qwen, "weights.safetensors")
    assert load(qwen).geometry.layers == 3


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000])
def test_an_index_that_is_none(qwen: Path, text: str) -> None:
    index(qwen)
    (qwen / INDEX).write_text(text)
    assert INDEX in refusal(qwen)


@pytest.mark.parametrize("name", [WHOLE, CONFIG, "tokenizer.json", "generation_config.json"])
def test_a_link_that_leaves_the_folder(qwen: Path, name: str) -> None:
    (qwen / name).touch()
    (qwen / name).rename(qwen.parent / "elsewhere")
    (qwen / name).symlink_to("../elsewhere")
    assert f"its {name} is a link that leaves its folder" in refusal(qwen)


def test_a_template_behind_a_link(qwen: Path) -> None:
    (qwen / "additional_chat_templates").mkdir()
    (qwen / "additional_chat_templates" / "tool.jinja").symlink_to("/etc/hostname")
    assert "tool.jinja is a link that leaves its folder" in refusal(qwen)


def test_links_within_the_folder_and_to_it(qwen: Path) -> None:
    (qwen / WHOLE).rename(qwen / "weights")
    (qwen / WHOLE).symlink_to("weights")
    (qwen.parent / "mine").symlink_to(qwen)
    assert load(qwen.parent / "mine").geometry.layers == 3


def test_a_link_to_itself(qwen: Path) -> None:
    (qwen / "merges.txt").symlink_to("merges.txt")
    assert "its merges.txt is a link" in refusal(qwen)


def cached(qwen: Path, cache: Path) -> Path:
    """The folder of a checkpoint in the hub's cache, whose files are links into the blobs beside it."""
    repository = cache / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    for file in qwen.iterdir():
        file.rename(repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("ab" * 20)
    return snapshot


def test_the_hubs_cache_may_have_links_to_its_blobs(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = cached(qwen, tmp_path / "cache")
    assert load(snapshot).geometry.layers == load("some/model").geometry.layers == 3
    assert load("some/model", revision="ab" * 20).card.path == "some/model"
    assert "cannot be loaded" in refusal("some/model", revision="another")
    (snapshot / WHOLE).unlink()
    (snapshot / WHOLE).symlink_to("../../refs/main")
    assert f"its {WHOLE} is a link that leaves its folder" in refusal("some/model")


def test_a_pipe_in_place_of_a_file(qwen: Path) -> None:
    (qwen / CONFIG).unlink()
    os.mkfifo(qwen / CONFIG)
    assert f"its {CONFIG} is no file" in refusal(qwen)


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json"])
def test_a_file_that_is_too_large_to_read(qwen: Path, name: str) -> None:
    with (qwen / name).open("ab") as file:
        file.truncate(MOST_CONFIG + 1)  # a hole, which takes no room on a disk
    assert f"its {name} has {MOST_CONFIG + 1:,} bytes" in refusal(qwen)


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return self.burst, ("it ran",)

    @staticmethod
    def burst(text: str) -> None:
        raise SystemExit(text)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(qwen: Path, name: str) -> None:
    (qwen / name).write_bytes(pickle.dumps(Bomb()))
    assert load(qwen).geometry.layers == 3
    (qwen / WHOLE).unlink()
    assert f"its files lack {WHOLE}; weights are read from safetensors only" in refusal(qwen)


def test_other_weights_that_the_config_names(qwen: Path) -> None:
    reconfigure(qwen, transformers_weights="../../x.safetensors")
    assert "config.json names '../../x.safetensors' for weights" in refusal(qwen)
    (qwen / WHOLE).rename(qwen / "mine.safetensors")
    reconfigure(qwen, transformers_weights="mine.safetensors")
    assert load(qwen).geometry.layers == 3


def test_adapters_and_parts_of_ranks(qwen: Path) -> None:
    (qwen / "adapter_config.json").write_text('{"base_model_name_or_path": "some/other"}')
    assert "it is an adapter" in refusal(qwen)
    (qwen / "adapter_config.json").unlink()
    (qwen / "shard-00001-model-00001-of-00001.safetensors").touch()
    assert "one of several ranks" in refusal(qwen)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", "[]", "\udc80"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_other_files_that_break_who_reads_them(qwen: Path, name: str, text: str) -> None:
    (qwen / name).write_text(text, errors="surrogateescape")
    refusal(qwen)


# -- headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, 12, "b lies at 4, where 8 is right"),
        ({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, 8, "b lies at 0, where 8 is right"),
        ({"a": tensor(0, 8, [2]), "b": tensor(12, 20, [2])}, 20, "b lies at 12, where 8 is right"),
        ({"a": tensor(0, 8, [2])}, 12, "has 12 bytes of weights, and its header tells of 8"),
        ({"a": tensor(0, 1 << 47, [1 << 45])}, 8, "is said to lie at"),
        ({"a": tensor(0, 8, [1 << 40, 1 << 40])}, 8, "has 8 bytes, and not those of"),
        ({"a": tensor(0, 8, [1 << 62, 4])}, 8, "has the shape"),
        ({"a": tensor(0, 8, [-1, -2])}, 8, "has the shape"),
        ({"a": tensor(0, 8, [2.0])}, 8, "has the shape"),
        ({"a": tensor(0, 8, [True, 2])}, 8, "has the shape"),
        ({"a": tensor(0, 4, [1] * 99)}, 4, "has the shape"),
        ({"a": tensor(0, 8, "22")}, 8, "has the shape"),  # type: ignore[arg-type]
        ({"a": tensor(8, 0, [2])}, 8, "is said to lie at"),
        ({"a": tensor(-8, 0, [2])}, 8, "is said to lie at"),
        ({"a": tensor(0, 8, [2], "PICKLE")}, 8, "has no number format"),
        ({"a": tensor(0, 8, [2], {})}, 8, "has no number format"),  # type: ignore[arg-type]
        ({"a": [1]}, 8, "has no number format"),
        ([1], 8, "is no object"),
        (b'{"a": {}, "a": {}}', 8, "a key stands there twice"),
        (b"{", 0, "cannot be read"),
        (b"[" * 100_000, 0, "it is nested too deeply"),
        (b"\xff\xfe\x00", 0, "cannot be read"),
    ],
    ids=str,
)
def test_a_header_that_contradicts_its_file(qwen: Path, header: Header | bytes, data: int, said: str) -> None:
    put(qwen, header, bytes(data))
    assert said in refusal(qwen)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 5000])
def test_a_header_that_is_longer_than_its_file(qwen: Path, length: int) -> None:
    put(qwen, {}, length=length)
    assert "is cut short" in refusal(qwen)


def test_a_header_of_gigabytes(qwen: Path) -> None:
    """The file has them, as a hole."""
    put(qwen, {}, length=4 << 30)
    os.truncate(qwen / WHOLE, 5 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"{MOST_HEADERS:,} at most are right" in refusal(qwen)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_a_tensor_in_two_files(qwen: Path) -> None:
    index(qwen, "weights.safetensors", "more.safetensors")
    (qwen / "more.safetensors").write_bytes(weights_of({"model.norm.weight": tensor(0, 4, [1])}, bytes(4)))
    assert "model.norm.weight, as another file has" in refusal(qwen)


# -- configs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 1e9),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 1 << 62),
        ("hidden_size", 1 << 40),
        ("num_attention_heads", -(1 << 60)),
        ("num_labels", 10**9),
        ("num_things", 10**9),
        ("anything", 10**4000),
        ("head_dim", float("nan")),
    ],
)
def test_numbers_that_no_model_has(qwen: Path, key: str, value: float) -> None:
    """The key is named, however deep it is."""
    whole = (qwen / CONFIG).read_text()
    for changes, way in (({key: value}, key), ({"text_config": [{key: value}]}, f"text_config.{key}")):
        (qwen / CONFIG).write_text(whole)
        reconfigure(qwen, **changes)
        assert f"its {CONFIG}: {way}: " in refusal(qwen)


def test_experts_of_all_layers_together(qwen: Path) -> None:
    reconfigure(qwen, num_hidden_layers=4000, num_experts=4000)
    assert "4,000 layers of 4,000 experts" in refusal(qwen)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_config_that_is_nested(qwen: Path, depth: int) -> None:
    (qwen / CONFIG).write_text('{"a":' * depth + "1" + "}" * depth)
    assert "nested" in refusal(qwen)


def test_more_parameters_than_the_files_hold(qwen: Path) -> None:
    """Transformers would make them up: 2 TB of them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reconfigure(qwen, vocab_size=1 << 23, hidden_size=1 << 16)
    assert "its config describes" in refusal(qwen)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024  # KiB


def test_weights_that_do_not_fit_this_machine(qwen: Path) -> None:
    """The file is as long as its header says, and nearly all of it a hole."""
    numbers = 1 << 38
    put(qwen, {"x": tensor(0, numbers, [numbers], "U8")})
    with (qwen / WHOLE).open("r+b") as file:
        file.truncate((qwen / WHOLE).stat().st_size + numbers)
    reconfigure(qwen, vocab_size=1 << 22, hidden_size=1 << 15)
    assert "bytes of memory, and" in refusal(qwen)
    (qwen / WHOLE).unlink()


def test_the_memory_that_a_container_leaves(tmp_path: Path) -> None:
    """Pages of files give way, and so does not what processes have."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       64000000 kB\nMemAvailable:   32000000 kB\nHugePages_Total:   0\n")
    assert available_memory(meminfo, tmp_path) == 32_000_000 << 10
    for name, text in (("max", str(4 << 30)), ("current", str(3 << 30))):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 30}\nactive_file {MIB}\ninactive_file {2 * MIB}\n")
    assert available_memory(meminfo, tmp_path) == (1 << 30) + 3 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 32_000_000 << 10


# -- digests --------------------------------------------------------------------------------------------


def test_weights_that_are_others_than_was_said(qwen: Path) -> None:
    digest = open_checkpoint(str(qwen)).digest()
    assert load(qwen, sha256=digest).geometry.layers == 3
    with (qwen / WHOLE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    changed = open_checkpoint(str(qwen)).digest()
    assert refusal(qwen, sha256=digest) == (
        f"models.mine: its weights have the sha256 {changed}, and {digest} is wanted"
    )


def test_weights_are_not_read_for_a_digest_that_nobody_wants(qwen: Path) -> None:
    checkpoint = open_checkpoint(str(qwen))
    (qwen / WHOLE).unlink()
    checkpoint.require_digest(None)
    with pytest.raises(FileNotFoundError):
        checkpoint.require_digest("ab" * 32)


def test_the_digest_does_not_depend_on_the_files_names(qwen: Path) -> None:
    whole = open_checkpoint(str(qwen)).digest()
    index(qwen, "weights.safetensors")
    assert open_checkpoint(str(qwen)).digest() == whole


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no {CONFIG}"):
        open_checkpoint(str(tmp_path))


# -- a check beside jobs --------------------------------------------------------------------------------


def _cut_short(path: Path) -> None:
    whole = (path / WHOLE).read_bytes()
    (path / WHOLE).write_bytes(whole[: len(whole) // 2])


def _without_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_cut_short, "is said to lie at"),
        (_without_tokenizer, "tokenizer"),
        (lambda path: reconfigure(path, model_type="t5", architectures=["T5Model"]), "encoder-decoder"),
    ],
)
def test_what_loading_refuses_a_check_refuses_too(
    qwen: Path, spoil: Callable[[Path], None], told: str
) -> None:
    spec = ModelSpec(name="mine", path=str(qwen))
    check_model(spec)
    spoil(qwen)
    with pytest.raises(ConfigError, match=told) as caught:
        check_model(spec)
    assert caught.value.message.startswith("models.mine: ")
    assert "\n" not in caught.value.message
