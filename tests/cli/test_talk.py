"""`kvloom chat`, `kvloom run` and `kvloom models` against a demo fleet that is served."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.cli.test_top import read_until
from tests.commands import kvloom
from tests.processes import DEADLINE, fleet

COMMAND = [sys.executable, "-m", "kvloom.cli"]
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet("--kv-memory", "64MiB") as running:
        yield running.wait_until_ready()
        assert running.end(signal.SIGINT) == 0


def piped(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command whose input and output are pipes."""
    return subprocess.run(
        [*COMMAND, *words], input=given, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@contextmanager
def in_terminal(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs a command in a terminal of its own. Gives the process and our side of the terminal. folder: where
    it keeps what was typed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(folder)}
    with subprocess.Popen(
        [*COMMAND, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            if process.poll() is None:
                process.kill()
            os.close(ours)


def test_one_answer_to_a_prompt_and_to_standard_input(url: str) -> None:
    done = piped("run", "sums", "What is 17 + 25?", "--temperature", "0", "--url", url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "17 + 25 = 42.\n", "")
    done = piped("run", "sums", "--temperature", "0", "--url", url, given="What is 1 + 2?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 + 2 = 3.\n", "")
    done = piped("run", "sums", "What is", "--temperature", "0", "--url", url, given="1 + 2?")
    assert (done.returncode, done.stderr) == (0, "")


def test_options_reach_the_model(url: str) -> None:
    words = ("run", "stories", "Tell me a story.", "--temperature", "1.5", "--max-tokens", "8", "--url", url)
    first, again, other = (piped(*words, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.stdout == again.stdout != other.stdout
    assert first.stderr == "kvloom: the answer was cut off at its most tokens\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "none", "x"), 1, "serves no model 'none', but guide, stories, sums\n"),
        (("run", "org/none", "x"), 1, "stories, sums; `kvloom serve org/none` serves it\n"),
        (("run", "sums", " "), 1, "the question is empty; PROMPT, or text on standard input, is right"),
        (("run", "sums", "x" * 5000), 1, "512"),
        (("run", "sums", "x", "--temperature", "nan"), 2, "'nan'; a number from 0 to 2 is right"),
        (("chat",), 1, "MODEL has to be one of those that are served: guide, stories, sums"),
    ],
)
def test_an_error_is_one_line(url: str, words: tuple[str, ...], code: int, said: str) -> None:
    done = piped(*words, "--url", url)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert said in done.stderr


def test_without_a_server_it_is_told_what_starts_one() -> None:
    done = kvloom("chat", "Qwen/Qwen3-0.6B", "--url", NOBODY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"kvloom: {NOBODY}: cannot be reached: Connection refused; "
        "`kvloom serve Qwen/Qwen3-0.6B` starts one, and --url names another\n"
    )


def test_models_are_lines_for_a_pipe(url: str) -> None:
    done = kvloom("models", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "guide\t1024\t-\tawake\tgenerate",
        "stories\t1024\t-\tawake\tgenerate",
        "sums\t512\t-\tawake\tgenerate",
    ]


def test_a_chat_in_a_pipe_answers_each_line(url: str) -> None:
    words = ("chat", "sums", "--temperature", "0", "--url", url)
    done = piped(*words, given="What is 1 + 2?\n\nWhat is 3 + 4?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 + 2 = 3.\n3 + 4 = 7.\n", "")


def test_a_chat_in_a_terminal(url: str, tmp_path: Path) -> None:
    words = ("chat", "sums", "--temperature", "0", "--url", url)
    with in_terminal(tmp_path, *words) as (process, terminal):
        read_until(terminal, b"> ")
        os.write(terminal, b"What is 17 + 25?\n")
        read_until(terminal, b"= 42.\r\n")
        os.write(terminal, b"/system You add.\n")
        read_until(terminal, b"the system message is set")
        os.write(terminal, b"/none\n")
        read_until(terminal, b"there is no /none; /help")
        os.write(terminal, b"/exit\n")
        read_until(terminal, b"/exit")
        assert process.wait(DEADLINE) == 0
    history = tmp_path / "kvloom" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    with in_terminal(tmp_path, *words) as (process, terminal):
        read_until(terminal, b"> ")
        os.write(terminal, b"\x1b[A" * 4 + b"\n")  # four lines back, over the end of the first chat
        _, _, behind = read_until(terminal, b"= 42.\r\n").partition(b"= 42.\r\n")
        if b"> " not in behind:
            read_until(terminal, b"> ")  # before that the terminal would keep the end of input to itself
        os.write(terminal, b"\x04")
        assert process.wait(DEADLINE) == 0


class Endless(BaseHTTPRequestHandler):
    """Answers with one piece, and then with nothing until the client goes."""

    asked: ClassVar[list[list[str]]] = []
    """The messages of each request."""

    def do_GET(self) -> None:
        self._begin(b'{"data": [{"id": "endless"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append([message["content"] for message in body["messages"]])
        self._begin(b'data: {"choices": [{"delta": {"content": "once\\u001b[2J upon"}}]}\n\n')
        self.connection.recv(1)

    def _begin(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


class Thinker(BaseHTTPRequestHandler):
    """Thinks, answers, and ends, with an escape sequence in its thoughts."""

    asked: ClassVar[list[list[str]]] = []
    """The messages of each request."""

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "thinker"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append([message["content"] for message in body["messages"]])
        deltas = [
            {"reasoning_content": "17 and\x1b[2J "},
            {"reasoning_content": "25?"},
            {"content": "4"},
            {"content": "2"},
        ]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        events = [*map(json.dumps, chunks), "[DONE]"]
        self._answer("".join(f"data: {event}\n\n" for event in events).encode())

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yields the address of a server that answers as the handler does."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def test_control_c_ends_an_answer_and_not_the_chat(tmp_path: Path) -> None:
    with answering(Endless) as url, in_terminal(tmp_path, "chat", "--url", url) as (process, terminal):
        assert b"endless at http" in read_until(terminal, b"> ")
        os.write(terminal, b"tell\n")
        shown = read_until(terminal, b" upon")
        assert "once\N{REPLACEMENT CHARACTER}[2J upon".encode() in shown
        process.send_signal(signal.SIGINT)
        read_until(terminal, b"> ")
        os.write(terminal, b"more\n")
        read_until(terminal, b" upon")
        process.send_signal(signal.SIGINT)
        read_until(terminal, b"> ")
        os.write(terminal, b"\x04")
        assert process.wait(DEADLINE) == 0
    assert Endless.asked == [["tell"], ["tell", "once\x1b[2J upon", "more"]]


def test_thoughts_are_dimmed_in_a_terminal_and_not_sent_again(tmp_path: Path) -> None:
    with answering(Thinker) as url, in_terminal(tmp_path, "chat", "--url", url) as (process, terminal):
        read_until(terminal, b"> ")
        os.write(terminal, b"sum\n")
        shown = read_until(terminal, b"> ").decode()
        assert "\x1b[2m17 and\N{REPLACEMENT CHARACTER}[2J 25?\x1b[22m\r\n\r\n42\r\n" in shown
        os.write(terminal, b"again\n")
        read_until(terminal, b"> ")
        os.write(terminal, b"\x04")
        assert process.wait(DEADLINE) == 0
        with in_terminal(tmp_path, "run", "thinker", "sum", "--no-thoughts", "--url", url) as (once, seen):
            assert read_until(seen, b"42\r\n") == b"42\r\n"
            assert once.wait(DEADLINE) == 0
    assert Thinker.asked == [["sum"], ["sum", "42", "again"], ["sum"]]


def test_a_pipe_has_the_answer_alone() -> None:
    with answering(Thinker) as url:
        words = ("run", "thinker", "sum", "--url", url)
        plain, shown = piped(*words), piped(*words, "--thoughts")
        line = piped("chat", "--thoughts", "--url", url, given="sum\n")
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "42\n", "")
    for done in (shown, line):
        assert (done.returncode, done.stdout) == (0, "42\n")
        assert done.stderr == "17 and\x1b[2J 25?\n\n"
