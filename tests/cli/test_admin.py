"""`kvloom program` and `kvloom unit` against a server that answers as it is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from kvloom.cli.__main__ import main
from kvloom.cli.gateway import Connection
from kvloom.types.service import NodeState
from tests.authorities import Authority


@dataclass
class Scripted:
    """What the server answers, and what it was asked: method, path, key and body."""

    status: int = 200
    answer: bytes = b'{"name": "balanced", "options": {"ratio": 0.2, "of": "1", "peers": ["a b"]}}'
    asked: list[tuple[str, str, str | None, bytes]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            scripted.asked.append((self.command, self.path, self.headers.get("authorization"), body))
            self.send_response(scripted.status)
            self.end_headers()
            self.wfile.write(scripted.answer)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        scripted.url = f"http://127.0.0.1:{http.server_port}/"
        yield scripted
        http.shutdown()
        thread.join()


def test_show(server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("# mine\nsecret\n")
    assert main(["program", "show", "--url", server.url, "--admin-key-file", str(tmp_path / "keys")]) == 0
    assert server.asked == [("GET", "/admin/program", "Bearer secret", b"")]
    shown = "balanced --option ratio=0.2 --option 'of=\"1\"' --option 'peers=[\"a b\"]'\n"
    assert capsys.readouterr().out == shown


def test_set(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["ratio=0.2", "adapt=true", "shape=1P2D", 'peers=["unit-0"]', "text=a=b"]
    options = [word for option in given for word in ("--option", option)]
    assert main(["program", "set", "my.own:route", *options, "--url", server.url]) == 0
    ((method, path, key, body),) = server.asked
    assert (method, path, key) == ("POST", "/admin/program", None)
    assert json.loads(body) == {
        "name": "my.own:route",
        "options": {"ratio": 0.2, "adapt": True, "shape": "1P2D", "peers": ["unit-0"], "text": "a=b"},
    }
    assert capsys.readouterr().out.startswith("balanced ")


def test_a_key_of_the_environment(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLOOM_ADMIN_KEY", "inherited")
    (tmp_path / "keys").write_text("given")
    assert main(["program", "show", "--url", server.url]) == 0
    assert main(["program", "show", "--url", server.url, "--admin-key-file", str(tmp_path / "keys")]) == 0
    assert [key for _, _, key, _ in server.asked] == ["Bearer inherited", "Bearer given"]
    monkeypatch.setenv("KVLOOM_ADMIN_KEY", "no\nkey")
    assert main(["program", "show", "--url", server.url]) == 2
    assert capsys.readouterr().err.startswith("kvloom: KVLOOM_ADMIN_KEY: a key of ASCII letters")


def unit(name: str, state: str, calls: int, *models: str, problem: str = "") -> bytes:
    shown = {"name": name, "state": state, "calls": calls, "models": models, "problem": problem}
    return json.dumps(shown).encode()


def test_units(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    away = unit("unit-10", "down", 0, problem="the engine cannot be reached")
    server.answer = b"[" + unit("unit-0", "draining", 1, "chat", "code") + b"," + away + b"]"
    assert main(["unit", "list", "--url", server.url]) == 0
    assert server.asked == [("GET", "/admin/units", None, b"")]
    assert capsys.readouterr().out.splitlines() == [
        "unit-0   draining  1 call   chat, code",
        "unit-10  down      0 calls   (the engine cannot be reached)",
    ]


def test_nodes(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    states = [
        NodeState(
            name="a",
            state="there",
            address="10.0.0.1",
            cores=8,
            memory=8 << 30,
            left=3 << 30,
            gpus=2,
            components=("gateway/1@a", "unit-0"),
        ),
        NodeState(name="b", state="drained", cores=2, problem="unit-1 needs 12 GiB"),
    ]
    server.answer = msgspec.json.encode(states)
    assert main(["node", "list", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a  there    10.0.0.1  8 cores, 2 GPUs  3 GiB of 8 GiB free      gateway/1@a, unit-0",
        "b  drained  -         2 cores          0 bytes of 0 bytes free  - (unit-1 needs 12 GiB)",
    ]
    server.answer = msgspec.json.encode(states[1])
    assert main(["node", "drain", "b", "--seconds", "2", "--url", server.url]) == 0
    assert main(["node", "admit", "b", "--url", server.url]) == 0
    asked = [(method, path, json.loads(body or b"0")) for method, path, _, body in server.asked]
    assert asked == [
        ("GET", "/admin/nodes", 0),
        ("POST", "/admin/nodes/b/drain", {"seconds": 2}),
        ("POST", "/admin/nodes/b/admit", {}),
    ]


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["drain", "unit-0"], {"seconds": None}),
        (["drain", "unit-0", "--seconds", "2.5"], {"seconds": 2.5}),
        (["restart", "unit-0"], {"seconds": None}),
        (["restart", "unit-0", "--seconds", "0"], {"seconds": 0}),
        (["admit", "unit-0"], {}),
        (["start", "unit-0"], {}),
        (["stop", "unit-0"], {"seconds": None}),
        (["stop", "unit-0", "--seconds", "3"], {"seconds": 3}),
    ],
)
def test_a_unit(
    server: Scripted, capsys: pytest.CaptureFixture[str], words: list[str], body: dict[str, object]
) -> None:
    server.answer = unit("unit-0", "drained", 0, "chat")
    assert main(["unit", *words, "--url", server.url]) == 0
    ((method, path, _, sent),) = server.asked
    assert (method, path, json.loads(sent)) == ("POST", f"/admin/units/unit-0/{words[0]}", body)
    assert capsys.readouterr().out == "unit-0  drained  0 calls  chat\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["unit", "restart", "unit-0"], "; the server goes on with it, which `kvloom unit list` shows"),
        (["unit", "drain", "unit-0"], "; the server goes on with it, which `kvloom unit list` shows"),
        (["restart", "--rolling"], "; the server goes on with it, which `kvloom unit list` shows"),
        (["program", "set", "x"], "; the server goes on with it, which `kvloom program show` shows"),
        (["program", "show"], ""),
        (["unit", "list"], ""),
    ],
)
def test_control_c_says_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "asked", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err == f"kvloom: interrupted{told}\n"


def test_a_name_stays_in_its_place(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.status, server.answer = 404, b'{"error": {"message": "there is no unit"}}'
    assert main(["unit", "drain", "../program", "--url", server.url]) == 1
    assert server.asked[0][1] == "/admin/units/..%2Fprogram/drain"
    assert "there is no unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (
            400,
            b'{"error": {"message": "no program \'x\'; known are\\n balanced"}}',
            "no program 'x'; known are balanced",
        ),
        (401, b"{}", "status 401"),
        (404, b"<html>", "status 404"),
        (500, b"", "status 500"),
        (200, b"<html>", "answers, but not as kvloom does"),
        (200, b'{"nam": 1}', "answers, but not as kvloom does"),
    ],
)
def test_a_server_that_says_no(
    server: Scripted, capsys: pytest.CaptureFixture[str], status: int, answer: bytes, said: str
) -> None:
    server.status, server.answer = status, answer
    assert main(["program", "set", "x", "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvloom: {server.url.rstrip('/')}: {said}")
    assert error.count("\n") == 1


def test_who_needs_a_key_is_told_how_to_give_one(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.answer = 401, b'{"error": {"message": "no admin key was given"}}'
    assert main(["unit", "list", "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert error.endswith("given; --admin-key-file FILE or $KVLOOM_ADMIN_KEY gives one\n")


def test_https_to_a_server_without_tls(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unit", "list", "--url", server.url.replace("http:", "https:")]) == 1
    assert "it seems to speak no TLS, for which --url http://HOST:PORT is right" in capsys.readouterr().err


def test_a_certificate_without_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Authority(tmp_path).sign("ops", "ops.example.org", user="ops")
    assert main(["unit", "list", "--certificate", own.certificate]) == 2
    assert "if its key is in another file, --key FILE is needed too" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for bad, said in ((url, "refused"), ("http://no.such.host.invalid", "cannot be reached")):
        assert main(["program", "show", "--url", bad]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_server_that_hangs_up(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"nonsense\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["program", "show", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (
            b'{"component": "unit-0", "state": "restarted", "seconds": 2.04}\n',
            0,
            "unit-0     restarted in 2.0 s",
        ),
        (
            b'{"component": "unit-0", "state": "failed", "problem": "it died"}\n',
            1,
            "unit-0     failed: it died",
        ),
        (b"", 1, "the gateway ended before the restart was over"),
        (b"nonsense\n", 1, "answers, but not as kvloom does"),
    ],
)
def test_a_rolling_restart(
    server: Scripted, capsys: pytest.CaptureFixture[str], last: bytes, code: int, said: str
) -> None:
    server.answer = b'{"component": "unit-0", "state": "restarting"}\n' + last
    assert main(["restart", "--rolling", "--seconds", "5", "--url", server.url]) == code
    [(method, path, _, body)] = server.asked
    assert (method, path, json.loads(body)) == ("POST", "/admin/restart", {"seconds": 5.0})
    printed = capsys.readouterr()
    assert printed.out.startswith("unit-0     restarting\n")
    assert said in printed.out + printed.err


def test_a_restart_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart"]) == 2
    assert "--rolling" in capsys.readouterr().err
