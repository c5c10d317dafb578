"""`kvloom workload` and `kvloom bench` as people type them: on a real fleet, and with what cannot be."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvloom.cli.__main__ import main
from kvloom.lab.workload.results import read_results
from tests.lab.bench.server import serving
from tests.processes import DEADLINE

SPEC = """\
name: small
seed: 5
requests: 24
rate: 60
alpha: 1.0
models: [sums, guide, stories]
lengths: {prompt: [4, 60], output: [2, 12]}
system: {tokens: 24}
priorities: {-1: 0.2, 0: 0.8}
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SPEC)
    assert main(["workload", "make", str(tmp_path / "small.yaml"), "-o", str(tmp_path / "small.jsonl")]) == 0
    return tmp_path / "small.jsonl"


@pytest.mark.parametrize("prompts", ["tokens", "text"])
def test_a_real_fleet(url: str, workload: Path, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = workload.with_suffix(".json"), workload.with_suffix(".html")
    flags = ["--prompts", prompts, "--slo", "end=60s", "--json", str(out), "--html", str(html)]
    assert main(["bench", "serve", "--url", url, "--workload", str(workload), *flags]) == 0
    shown = capsys.readouterr().out
    for words in (
        "small at http://",
        "sums",
        "guide",
        "stories",
        "100.0%",
        "late (P99)",
        "the client used 0.",
    ):
        assert words in shown
    results = read_results(out)
    assert (results.total.requests, results.total.errors) == (24, 0)
    lines = [json.loads(line) for line in workload.read_text().splitlines()[1:]]
    assert results.total.output_tokens == sum(line["output"] for line in lines)
    assert results.total.cached_tokens > 24, "the system prompts were found in the cache"
    assert "Tokens a second" in html.read_text()


def test_another_spec_of_the_same_fleet_by_one_name(url: str, workload: Path) -> None:
    """The spec itself, and the page drawn from results."""
    folder = workload.parent
    spec, out, html = (str(folder / name) for name in ("small.yaml", "r.json", "r.html"))
    flags = ["--model", "sums", "--rate-scale", "5", "--slo-scale", "50", "--json", out]
    assert main(["bench", "serve", "--url", f"{url}/v1", "--workload", spec, *flags]) == 0
    assert list(read_results(Path(out)).total.attained) == ["≤ 50×"]
    assert main(["bench", "page", out, "-o", html]) == 0
    assert Path(html).read_text().startswith("<!doctype html>")


def test_a_request_that_cannot_be_is_an_error_of_the_server(
    url: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every one is past the vocabulary: told, counted, exit code 1."""
    flags = ["--url", url, "--vocab", "2000000"]
    assert main(["bench", "serve", "--workload", str(workload), *flags]) == 1
    assert "is not in the vocabulary" in capsys.readouterr().out


def test_ctrl_c_hangs_up_and_writes_nothing(workload: Path) -> None:
    out = workload.parent / "r.json"

    async def interrupt() -> tuple[int | None, bytes]:
        asked, hung_up = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                hung_up.set()
            raise AssertionError

        async with serving(answer, None) as seen:
            words = ["bench", "serve", "--url", seen.url, "--workload", str(workload), "--json", str(out)]
            running = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvloom.cli", *words, stderr=asyncio.subprocess.PIPE
            )
            await asyncio.wait_for(asked.wait(), DEADLINE)
            running.send_signal(signal.SIGINT)
            _, errors = await asyncio.wait_for(running.communicate(), DEADLINE)
            await asyncio.wait_for(hung_up.wait(), DEADLINE)
        return running.returncode, errors

    assert asyncio.run(interrupt()) == (130, b"kvloom: interrupted; nothing was written\n")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("workload",), ["a command is missing; known are make, show", "`kvloom workload --help`"]),
        (("workload", "make", "small.yaml"), ["-o"]),
        (("workload", "make", "small.jsonl", "-o", "x"), ["small.jsonl", "a spec, in YAML or JSON"]),
        (("workload", "make", "nowhere.yaml", "-o", "x"), ["nowhere.yaml", "No such file"]),
        (("workload", "make", "bad.yaml", "-o", "x"), ["bad.yaml: rate: -3", "more than 0 is right"]),
        (("workload", "make", "small.yaml", "-o", "x", "--seed", "-1"), ["seed: -1", "0 or more"]),
        (("workload", "make", "small.yaml", "-o", "no/x"), ["no/x", "a path that can be written"]),
        (("workload", "make", "empty.yaml", "-o", "x"), ["empty.yaml: asks for nothing"]),
        (("workload", "show", "bad.yaml"), ["bad.yaml: rate: -3"]),
        (("workload", "show", "deep.yaml"), ["deep.yaml: is nested too deeply"]),
        (("workload", "show", "cut.jsonl"), ["cut.jsonl: line 6: ", "truncated"]),
        (("bench", "serve"), ["--workload"]),
        (("bench", "serve", "--workload", "cut.jsonl"), ["cut.jsonl: line 6: "]),
        (("bench", "serve", "--workload", "small.jsonl", "--url", "h:1"), ["--url h:1", "http://HOST:PORT"]),
        (("bench", "serve", "--workload", "small.jsonl", "--rate-scale", "-1"), ["--rate-scale -1"]),
        (("bench", "serve", "--workload", "small.jsonl", "--rate-scale", "nan"), ["--rate-scale nan"]),
        (("bench", "serve", "--workload", "small.jsonl", "--vocab", "3"), ["--vocab 3", "32 or more"]),
        (("bench", "serve", "--workload", "small.jsonl", "--timeout", "x"), ["--timeout: 'x'", "`30s`"]),
        (("bench", "serve", "--workload", "small.jsonl", "--slo", "ttft=1"), ["--slo ttft=1", "per_token"]),
        (("bench", "serve", "--workload", "small.jsonl", "--slo", "end=x"), ["--slo end: 'x'"]),
        (
            ("bench", "serve", "--workload", "small.jsonl", "--slo", "end"),
            ["--slo end: end=TIME is right, as `end=200ms`"],
        ),
        (("bench", "serve", "--workload", "small.jsonl", "--slo-scale", "0"), ["--slo-scale 0"]),
        (("bench", "serve", "--workload", "small.jsonl", "--model", "=x"), ["--model =x", "NAME=REMOTE"]),
        (
            ("bench", "serve", "--workload", "small.jsonl", "--model", "x", "--model", "y"),
            ["--model y", "twice"],
        ),
        (
            ("bench", "serve", "--workload", "small.jsonl", "--json", "no/r.json"),
            ["no/r.json", "no such folder"],
        ),
        (("bench", "page", "small.jsonl", "-o", "x"), ["small.jsonl: no results file"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    parts: list[str],
    workload: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workload.parent)
    lines = workload.read_bytes().splitlines(keepends=True)
    Path("cut.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:30])
    Path("bad.yaml").write_text(SPEC.replace("rate: 60", "rate: -3"))
    Path("deep.yaml").write_text("[" * 20_000)
    Path("empty.yaml").write_text(SPEC.replace("requests: 24", "seconds: 0.000001"))
    before = sorted(path.name for path in Path().iterdir())
    capsys.readouterr()
    code = main(arguments)
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.count("\n") == 1
    for part in ("kvloom: ", *parts):
        assert part in shown.err
    assert sorted(path.name for path in Path().iterdir()) == before


def test_a_server_that_is_not_there(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["bench", "serve", "--workload", str(workload), "--url", "http://127.0.0.1:9"]) == 1
    remedy = "`kvloom serve` starts one, and --url names another"
    error = f"kvloom: http://127.0.0.1:9: cannot be reached: Connection refused; {remedy}\n"
    assert capsys.readouterr().err == error
