"""Workload files and published traces: written, read as a stream, and refused with the line that is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.lab.workload.request import Segment, WorkloadRequest
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS, VERSION, Header, read_workload, write_workload
from kvloom.types.errors import ConfigError

HEADER = Header(kvloom_workload=VERSION, name="w", seed=4, vocab=99, models=("a", "b"))
HEAD = b'{"kvloom_workload":1,"models":["a"]}\n'
GOOD = b'{"at":1.0,"model":"a","prompt":5,"output":2}\n'

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:16:50.9951690,9,1"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 7]}
"""

asks = st.lists(
    st.builds(
        WorkloadRequest,
        at=st.floats(0, 1e6),
        model=st.sampled_from(["a", "b"]),
        prompt=st.integers(50, 2**31 - 1),
        output=st.integers(1, 2**31 - 1),
        priority=st.integers(-9, 9),
        shared=st.lists(st.builds(Segment, st.integers(-9, 2**53), st.integers(1, 10)), max_size=5).map(
            tuple
        ),
    ),
    min_size=1,
).map(lambda found: sorted(found, key=lambda ask: ask.at))


@settings(max_examples=40, deadline=None)
@given(asks)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, given_asks: list[WorkloadRequest]
) -> None:
    path = tmp_path_factory.mktemp("files") / "w.jsonl"
    assert write_workload(path, HEADER, given_asks) == len(given_asks)
    workload = read_workload(path)
    assert workload.header == msgspec.structs.replace(HEADER, requests=len(given_asks))
    for _ in range(2):
        assert list(workload.requests()) == given_asks
    assert [found.name for found in path.parent.iterdir()] == ["w.jsonl"]


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> object:
        yield WorkloadRequest(at=0.0, model="a", prompt=1, output=1)
        raise ConfigError("lengths: no")

    with pytest.raises(ConfigError, match="lengths: no"):
        write_workload(tmp_path / "w.jsonl", HEADER, broken())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="No such file or directory; a path that can be written"):
        write_workload(tmp_path / "nowhere" / "w.jsonl", HEADER, [])


def test_reading_is_a_stream(tmp_path: Path) -> None:
    """The good lines before a bad one are there."""
    path = tmp_path / "w.jsonl"
    path.write_bytes(HEAD + 3 * GOOD + b"nonsense\n" + GOOD)
    stream = read_workload(path).requests()
    assert [next(stream).prompt for _ in range(3)] == [5, 5, 5]
    with pytest.raises(ConfigError, match="line 5: "):
        next(stream)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; a kvloom workload, an Azure CSV"),
        (b"\n\n", "is empty"),
        (b"hello\n", "line 1: 'hello'; a kvloom workload"),
        (b"\x00\xff\n", "line 1: "),
        (b'{"kvloom_workload":1,"models":["a","a"]}\n', "line 1: a model stands twice among `models`"),
        (b'{"kvloom_workload":2}\n', "line 1: is a workload of version 2; this kvloom reads version 1"),
        (b'{"kvloom_workload":"x"}\n', r"line 1: Expected `int`"),
        (HEAD, "asks for nothing"),
        (HEAD.replace(b"1,", b'1,"requests":2,') + GOOD, "1 requests, but its header says 2; it was cut"),
        (HEAD + GOOD[:20], "line 2: Input data was truncated"),
        (HEAD + GOOD + GOOD.replace(b"1.0", b"0.5"), "line 3: comes at 0.5 s, after one at 1 s"),
        (HEAD + GOOD.replace(b"1.0", b"-1"), r"line 2: Expected `float` >= 0.0 - at `\$.at`"),
        (HEAD + GOOD.replace(b"1.0", b"1e999"), "line 2: "),
        (HEAD + GOOD.replace(b"1.0", b"NaN"), "line 2: "),
        (HEAD + GOOD.replace(b"5", b"0"), r"line 2: Expected `int` >= 1 - at `\$.prompt`"),
        (HEAD + GOOD.replace(b"5", b"99999999999"), r"line 2: .*`\$.prompt`"),
        (HEAD + GOOD.replace(b'"a"', b'"c"'), "line 2: model `c` is not among the header's"),
        (HEAD + GOOD.replace(b"}", b',"shared":[[1,6]]}'), "line 2: more shared tokens than the prompt's 5"),
        (HEAD + GOOD.replace(b"}", b',"x":' + b"[" * 9000), "line 2: maximum recursion depth exceeded"),
        (HEAD.replace(b"}", b',"x":' + b"[" * 9000), "line 1: maximum recursion depth exceeded"),
        (HEAD + b"x" * ((16 << 20) + 2), "line 2: is longer than 16 MiB"),
        (AZURE.replace("396,109", "396"), "line 3: '2023-11-16 18:15:50.9951690,396'; a time, prompt"),
        (AZURE.replace("396", "-396"), r"line 3: .*Expected `int` >= 1 - at `\$.prompt`"),
        (AZURE.replace("18:15:50", "25:15:50"), "line 3: "),
        (AZURE.replace("18:15:50.9951690", "18:15:50.9+00:00"), "line 3: "),
        (AZURE.replace("18:16:50", "18:15:47"), "line 4: comes at 1.31.* s, after one at 4.31.* s"),
        (AZURE.replace("9,1", "9,é"), "line 4: "),
        (AZURE.split("\r", maxsplit=1)[0], "asks for nothing"),
        (MOONCAKE.replace("[0, 7]", "[0, 7, 8]"), "line 2: 3 hash_ids for 1024 tokens; 2 are right"),
        (MOONCAKE.replace("[0, 7]", "[]"), "line 2: 0 hash_ids"),
        (MOONCAKE.replace("1500", "-1"), r"line 2: Expected `float` >= 0.0 - at `\$.timestamp`"),
        (MOONCAKE[:-20], "line 2: Input data was truncated"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: bytes | str, said: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=said) as caught:
        list(read_workload(path).requests())
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{path}: ")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="the path of a workload or of a trace is right"):
            read_workload(path)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    workload = read_workload(write(tmp_path, AZURE))
    assert workload.header.models == (NAMELESS,)
    asks = list(workload.requests())
    assert [ask.at for ask in asks] == pytest.approx([0, 4.314579, 64.314579])
    assert [(ask.prompt, ask.output, ask.shared) for ask in asks] == [
        (374, 44, ()),
        (396, 109, ()),
        (9, 1, ()),
    ]


def test_mooncake_blocks_are_segments_and_the_last_is_cut(tmp_path: Path) -> None:
    first, second = read_workload(write(tmp_path, MOONCAKE)).requests()
    assert (first.at, first.prompt, first.output) == (0, 1030, 5)
    assert first.shared == (Segment(0, 512), Segment(1, 512), Segment(2, 6))
    assert second.at == 1.5
    assert second.shared == (Segment(0, 512), Segment(7, 512))


def real(name: str) -> Path:
    path = Path(os.environ.get("KVLOOM_DATA", "/nowhere"), name)
    if not path.exists():
        pytest.skip(f"KVLOOM_DATA names no folder with {name}")
    return path


def test_the_real_azure_trace_is_as_published() -> None:
    traffic = Traffic(read_workload(real("azure_llm_2023_conv.csv")).requests())
    model = traffic.models[NAMELESS]
    assert (model.requests, round(traffic.seconds)) == (19366, 3502)
    assert (round(model.prompt.mean), round(model.output.mean)) == (1155, 211)
    assert model.cv == pytest.approx(1.09, abs=0.005)
    assert model.prompt.quantiles((0.5, 0.99)) == pytest.approx([1020, 4142], rel=0.005)


def test_the_real_mooncake_trace_is_read() -> None:
    traffic = Traffic(read_workload(real("mooncake_conversation.jsonl")).requests())
    assert traffic.total.requests == 12031
    assert traffic.total.prompt.most == 126195
