"""Published traces: small ones of their form, and the real ones where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvloom.lab.workload.request import Segment
from kvloom.lab.workload.summary import Traffic
from kvloom.lab.workload.traces import NAMELESS, read_workload
from kvloom.types.errors import ConfigError

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:16:50.9951690,9,1"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 7]}
"""


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
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
def test_bad_traces_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        list(read_workload(path).requests())
    assert "\n" not in caught.value.message


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
