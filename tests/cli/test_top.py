"""`kvloom top` against a server that tells what it is told to, and its pictures at every width."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from kvloom.cli.__main__ import main
from kvloom.cli.gateway import ServerEvent
from kvloom.cli.top.picture import draw
from kvloom.cli.top.watched import Watched
from kvloom.journal.records import Event, Moved, Preempted, Record
from kvloom.journal.samples import ModelTotals, Sample, UnitModel, UnitSample, Wave

HOSTILE = "[red]名\x1b[2J\u202e</b>"


def model(name: str, *, output: int = 0, waiting: int = 0, used: int = 0, quota: int = 0) -> UnitModel:
    return UnitModel(
        model=name,
        waiting=waiting,
        oldest=1.25 if waiting else 0.0,
        running=3,
        used=used,
        cached=10,
        pinned=0,
        quota=quota,
        weights=0,
        awake=True,
        away=0,
        prompt_tokens=2 * output,
        cached_tokens=output,
        output_tokens=output,
        preemptions=7,
    )


def sample(at: float, output: int = 0, *, name: str = "code") -> Sample:
    """Returns a sample of two units, of which one is down."""
    totals = ModelTotals(
        model="chat",
        requests=output // 10,
        ttft_sum=output / 100,
        ttft_count=output // 10,
        tpot_sum=output / 500,
        tpot_count=output // 10,
    )
    busy = UnitSample(
        unit="unit-0",
        state="up",
        node="front",
        blocks=100,
        free=50,
        lent=5,
        block_bytes=1 << 30,
        models=(model("chat", output=output, waiting=2, used=30, quota=60), model(name, used=10, quota=40)),
        waves=(Wave("unit-1", 0.25),),
    )
    gone = UnitSample(
        unit="unit-1", state="down", node="", blocks=0, free=0, lent=0, block_bytes=0, models=()
    )
    return Sample(at=at, units=(busy, gone), models=(totals,))


def record(number: int, event: Event) -> Record:
    return Record(journal=7, number=number, at=1000.0 + number, component="unit-0", event=event)


MOVED = Moved(
    request="r-1", model="chat", source="unit-1", destination="unit-0", reason="freeness 12 against 48"
)


def told(kind: str, thing: object, name: str = "") -> bytes:
    return f"id: {name}\nevent: {kind}\ndata: ".encode() + msgspec.json.encode(thing) + b"\n\n"


def journal(*records: Record) -> bytes:
    return b": the journal\n\n" + b"".join(told("moved", one, one.id) for one in records)


def live(*samples: Sample) -> bytes:
    first, *others = samples
    return told("history", {"samples": [first]}) + b"".join(told("sample", one) for one in others)


@dataclass
class Server:
    """What it answers by path, each in its turn and the last one again and again; the status of all; who
    asked for what."""

    answers: dict[str, list[bytes]] = field(default_factory=dict)
    status: int = 200
    url: str = ""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    held: bool = False
    """The last answer of each path is not ended before the test is."""
    resumed: threading.Event = field(default_factory=threading.Event)
    """It is set once somebody has asked from a last event on."""
    late: bool = False
    """`/admin/live` is answered only then."""


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key, last = self.headers.get("authorization"), self.headers.get("last-event-id")
            scripted.asked.append((self.path, key, last))
            if last is not None:
                scripted.resumed.set()
            if scripted.late and self.path == "/admin/live":
                scripted.resumed.wait(60)
            answers = scripted.answers.get(self.path, [b'{"error":{"message":"no admin key"}}'])
            last_one = len(answers) == 1
            answer = answers[0] if last_one else answers.pop(0)
            self.send_response(scripted.status)
            self.end_headers()
            self.wfile.write(answer)
            self.wfile.flush()
            if scripted.held and last_one and scripted.status == 200:
                scripted.over.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        scripted.url = f"http://127.0.0.1:{http.server_port}"
        yield scripted
        scripted.over.set()
        http.shutdown()
        thread.join()


def test_one_picture_is_printed_where_it_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLOOM_ADMIN_KEY", "secret")
    server.answers["/admin/live"] = [live(sample(100.0), sample(104.0, 200), sample(110.0, 1000))]
    server.answers["/admin/events"] = [journal(record(1, MOVED))]
    assert main(["top", "--once", "--url", server.url]) == 0
    assert server.asked == [("/admin/events", "Bearer secret", None), ("/admin/live", "Bearer secret", None)]
    lines = capsys.readouterr().out.splitlines()
    assert "2 units, 2 models, 100 tokens/s" in lines[0]
    (unit,) = [line for line in lines if line.startswith("unit-0")]
    assert unit == "unit-0  up  front  100 GiB, 50% free, 5% lent  unit-1 waits 250 ms a task"
    assert "unit-1  down" in lines
    rows = [line.split() for line in lines if line.startswith("chat")]
    assert rows[0][2:] == ["40%", "60%", "3", "2", "1.2s", "7", "awake"]
    assert re.fullmatch("█+▓+·+", rows[0][1])
    assert rows[1] == ["chat", "100", "100", "ms", "20", "ms", "33%", "10"]
    assert lines[-1].endswith("moved       unit-0: chat r-1 unit-1 to unit-0; freeness 12 against 48")


def test_a_refusal_is_told_in_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 401
    assert main(["top", "--url", server.url]) == 1
    assert "no admin key; --admin-key-file FILE" in capsys.readouterr().err


def test_another_server_is_told_in_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = {"/admin/events": [b""], "/admin/live": [b"event: sample\ndata: {}\n\n"]}
    assert main(["top", "--once", "--url", server.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "answers, but not as this kvloom does" in line


@pytest.mark.parametrize("width", [60, 79, 80, 100, 160, 250])
def test_a_picture_of_any_width_holds_no_sign_that_steers_a_terminal(width: int) -> None:
    fleet = Watched("http://127.0.0.1:8000/" + "long/" * 60)
    fleet.problem = "cannot be reached " * 20
    reason = "gave way to chat\x9b31m " * 20
    event = Preempted(model=HOSTILE, request="r-2", reason=reason)
    for old in (sample(100.0, name=HOSTILE), sample(110.0, 1000, name=HOSTILE)):
        fleet.take(ServerEvent("sample", "", msgspec.json.encode(old)))
    fleet.take(ServerEvent("preempted", "7-1", msgspec.json.encode(record(1, event))))
    picture = draw(fleet, width)
    lines = picture.plain.split("\n")
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert any(line.startswith("[red]名") for line in lines)
    chat = [line for line in lines if line.startswith("chat")]
    assert len(chat) == 2
    assert "40%" in chat[0]
    assert "2 1.2s" in chat[0]


def test_a_picture_has_as_many_lines_as_there_are() -> None:
    fleet = Watched("http://here")
    fleet.take(ServerEvent("sample", "", msgspec.json.encode(sample(100.0))))
    for number in range(50):
        fleet.take(ServerEvent("moved", f"7-{number}", msgspec.json.encode(record(number, MOVED))))
    for height in (8, 24, 40):
        assert len(draw(fleet, 80, height).plain.split("\n")) <= height


def test_one_thing_is_counted_in_the_singular() -> None:
    fleet = Watched("http://here")
    fleet.take(ServerEvent("sample", "", msgspec.json.encode(sample(100.0, name="chat"))))
    assert "2 units, 1 model, " in draw(fleet, 80).plain.split("\n")[0]


def test_totals_that_began_anew_are_no_negative_rates() -> None:
    fleet = Watched("http://here")
    for one in (sample(100.0, 5000), sample(105.0, 100)):
        fleet.take(ServerEvent("sample", "", msgspec.json.encode(one)))
    assert fleet.paces()["chat"].tokens == 0.0
    assert fleet.paces()["chat"].requests == 2.0


def test_the_first_request_of_a_model_counts_for_its_rate() -> None:
    """A gateway has no totals of a model before its first request has ended."""
    fleet = Watched("http://here")
    for one in (replace(sample(100.0), models=()), sample(110.0, 100)):
        fleet.take(ServerEvent("sample", "", msgspec.json.encode(one)))
    pace = fleet.paces()["chat"]
    assert (pace.tokens, pace.requests, pace.first) == (10.0, 1.0, 0.1)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Returns what a terminal is told up to some words. At a command's end it raises OSError."""
    shown = b""
    while wanted not in shown:
        shown += os.read(terminal, 1 << 16)
    return shown


def test_in_a_terminal_it_asks_again_and_ends_by_control_c(server: Server) -> None:
    """Its journal ends before the first sample comes."""
    server.held = server.late = True
    server.answers["/admin/live"] = [
        live(sample(100.0), sample(110.0, 1000)),
        live(sample(100.0), sample(120.0, 4200)),
    ]
    server.answers["/admin/events"] = [journal(record(1, MOVED)), journal(record(2, MOVED))]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvloom.cli", "top", "--url", server.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "40"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        assert b"unit-0" in read_until(ours, b"asked again each second")
        read_until(ours, b"210 tokens/s")
        assert server.resumed.wait(60)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                if not os.read(ours, 1 << 16):
                    break
            except OSError:  # the terminal's other side is closed
                break
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 0
    os.close(ours)
    assert ("/admin/events", None, "7-1") in server.asked
