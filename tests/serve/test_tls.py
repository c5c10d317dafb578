"""A gateway that speaks TLS: its certificates, those of its callers, and callers that do not shake hands."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvloop
from msgspec.structs import replace
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.api.app import create_app
from kvloom.api.auth import Keys
from kvloom.config.tls import TlsFiles
from kvloom.serve.machine import listen_inside
from kvloom.serve.processes.gateways import FleetClient
from kvloom.serve.server import ClientConnection
from kvloom.serve.tls import Certificates, TlsServer
from kvloom.types.clock import WallClock
from kvloom.types.errors import ConfigError
from tests.api.fleet import administered
from tests.api.scripted import ScriptedEngine, says
from tests.authorities import Authority

HELLO = PlainTextResponse("hello")
DEADLINE = 120.0


def stopping(go_on: asyncio.Event) -> ASGIApp:
    """Returns an application whose answer stops after its first half."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces() -> AsyncIterator[str]:
            yield "one "
            await go_on.wait()
            yield "two"

        await StreamingResponse(pieces())(scope, receive, send)

    return answer


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(Certificates, "LOOK_SECONDS", 0.0)
    return Authority(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The fleet's own."""
    made = tmp_path / "fleet"
    made.mkdir()
    return made


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop that the processes run on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


@asynccontextmanager
async def served(
    folder: Path, files: TlsFiles, app: ASGIApp = HELLO, listener: socket.socket | None = None
) -> AsyncIterator[tuple[str, TlsServer]]:
    """The server, and its URL; it also listens at FOLDER/gateway."""
    listener, ready = listener or socket.create_server(("127.0.0.1", 0)), asyncio.Event()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    certificates = Certificates(files, folder, WallClock())
    server = TlsServer(app, connection=ClientConnection, certificates=certificates, grace=1, ready=ready.set)
    (folder / "gateway").unlink(missing_ok=True)
    with listen_inside(folder / "gateway") as inside:
        sockets = [listener, inside.dup()]
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets))
        await ready.wait()
        yield url, server
        server.end()


def trusting(authority: Authority, own: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def client(authority: Authority, own: TlsFiles | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=trusting(authority, own), timeout=DEADLINE)


def spoil(file: str) -> None:
    Path(file).write_text("nothing")


async def shown(url: str, authority: Authority) -> set[str]:
    """The names in the certificate that a new connection is shown."""
    port = int(url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
    names = {name for _, name in writer.get_extra_info("peercert")["subjectAltName"]}
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return names


def test_the_official_client(folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))

    async def play() -> None:
        app = create_app(ScriptedEngine(says("hello world")), keys=Keys({"asker": None}))
        async with (
            served(folder, authority.sign("cert"), app) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="asker", max_retries=0) as asked,
        ):
            answer = await asked.completions.create(model="tiny", prompt="hi")
            assert answer.choices[0].text == "hello world"
            stream = await asked.completions.create(model="tiny", prompt="hi", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"

    run(play)


def test_large_bodies_both_ways(folder: Path, authority: Authority) -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        await PlainTextResponse(body + message["body"])(scope, receive, send)

    async def play() -> None:
        async with served(folder, authority.sign("cert"), echo) as (url, _), client(authority) as http:
            sent = os.urandom(3 << 20)
            assert (await http.post(url, content=sent)).content == sent

    run(play)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions(folder: Path, authority: Authority, version: ssl.TLSVersion) -> None:
    async def play() -> None:
        async with served(folder, authority.sign("cert")) as (url, _):
            context = trusting(authority)
            context.minimum_version = context.maximum_version = version
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
            assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
            writer.close()

    run(play)


def test_another_certificate_breaks_no_stream(
    folder: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvloom.serve.tls")
    go_on = asyncio.Event()

    async def play() -> None:
        files = authority.sign("cert", "127.0.0.1", "first")
        async with (
            served(folder, files, stopping(go_on)) as (url, _),
            client(authority) as http,
            http.stream("GET", url) as answer,
        ):
            parts = answer.aiter_text()
            assert await anext(parts) == "one "
            authority.sign("cert", "127.0.0.1", "second")
            assert await shown(url, authority) == {"127.0.0.1", "second"}
            spoil(files.key)
            assert await shown(url, authority) == {"127.0.0.1", "second"}
            assert await shown(url, authority) == {"127.0.0.1", "second"}
            os.unlink(files.certificate)
            assert await shown(url, authority) == {"127.0.0.1", "second"}
            authority.sign("cert", "127.0.0.1", "old", days=-1)
            assert await shown(url, authority) == {"127.0.0.1", "second"}
            authority.sign("cert", "127.0.0.1", "third")
            assert await shown(url, authority) == {"127.0.0.1", "third"}
            go_on.set()
            assert await anext(parts) == "two"

    run(play)
    lines = [record.getMessage() for record in caplog.records]
    assert [("stays" in line) for line in lines] == [False, True, True, True, False]
    assert all("\n" not in line and str(folder.parent) in line for line in lines)


def test_a_gateway_that_retires_serves_its_streams_to_their_end(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes meanwhile is served by the one that takes its place at the same socket."""
    monkeypatch.setattr("kvloom.serve.server.LINGER_SECONDS", 0.0)
    go_on = asyncio.Event()

    async def play() -> None:
        files = authority.sign("cert")
        listener = socket.create_server(("127.0.0.1", 0))
        async with (
            served(folder, files, stopping(go_on), listener.dup()) as (url, first),
            client(authority) as http,
            http.stream("GET", url) as answer,
        ):
            parts = answer.aiter_text()
            assert await anext(parts) == "one "
            first.retire(DEADLINE)
            async with served(folder, files, HELLO, listener), client(authority) as other:
                for _ in range(5):
                    assert (await other.get(url, headers={"connection": "close"})).text == "hello"
                go_on.set()
                assert await anext(parts) == "two"

    run(play)


def test_a_new_gateway_starts_from_what_was_read_last(folder: Path, authority: Authority) -> None:
    async def play() -> None:
        files = authority.sign("cert", "127.0.0.1", "good")
        async with served(folder, files):
            pass
        spoil(files.certificate)
        async with served(folder, files) as (url, _):
            assert await shown(url, authority) == {"127.0.0.1", "good"}
        os.unlink(folder / "tls.key")
        with pytest.raises(ConfigError, match=r"^tls: certificate: \S+cert\.pem holds none; "):
            Certificates(files, folder, WallClock())

    run(play)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_handshake_that_does_not_come(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(TlsServer, "HANDSHAKE_SECONDS", 0.2)

    async def play() -> None:
        async with served(folder, authority.sign("cert")) as (url, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent)
            with suppress(ConnectionError):
                assert b"hello" not in await reader.read()
                monkeypatch.setattr(TlsServer, "HANDSHAKE_SECONDS", DEADLINE)
            async with client(authority) as http:
                assert (await http.get(url)).text == "hello"
            writer.close()

    run(play)


def test_many_handshakes_that_do_not_come(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end each other, oldest first, and an innocent caller from elsewhere is let in."""
    monkeypatch.setattr(TlsServer, "MOST_HANDSHAKES", 8)
    monkeypatch.setattr(TlsServer, "HANDSHAKE_SECONDS", DEADLINE)

    async def play() -> None:
        async with served(folder, authority.sign("cert")) as (url, server):
            port = int(url.rpartition(":")[2])
            loop = asyncio.get_running_loop()
            innocent = socket.socket()
            innocent.setblocking(False)
            innocent.bind(("127.0.0.2", 0))
            await loop.sock_connect(innocent, ("127.0.0.1", port))
            attackers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            for reader, _ in attackers[:22]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            assert server.handshakes <= 8
            reader, writer = await asyncio.open_connection(
                sock=innocent, ssl=trusting(authority), server_hostname="127.0.0.1"
            )
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"hello")
            writer.close()
            for _, writer in attackers:
                writer.close()

    run(play)


def statuses(
    folder: Path, authority: Authority, keys: Keys, own: TlsFiles | None, key: str = "", **headers: str
) -> dict[str, int]:
    """How each path is answered, if it is, over connections with a client's certificate, or none."""
    found: dict[str, int] = {}
    files = replace(authority.sign("cert"), client_ca=str(authority.file))
    app = administered(
        keys=keys, certified=True, proxies=["127.0.0.0/8"] if "x_forwarded_for" in headers else ()
    ).app
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {"authorization": f"Bearer {key}"} if key else {}

    async def play() -> None:
        async with served(folder, files, app) as (url, _), client(authority, own) as http:
            for path in ("/health", "/admin/units", "/verbs/unit-0/load"):
                with suppress(httpx.TransportError):
                    found[path] = (await http.get(url + path, headers=sent)).status_code

    run(play)
    return found


@pytest.mark.parametrize(
    ("admin", "shows", "key", "status"),
    [
        ((), False, "", 403),
        ((), True, "", 200),
        (("admin",), True, "", 401),
        (("admin",), False, "admin", 403),
        (("admin",), True, "admin", 200),
        ((), False, "fleet", 200),
    ],
)
def test_certificates_of_admins(
    folder: Path, authority: Authority, admin: tuple[str, ...], shows: bool, key: str, status: int
) -> None:
    own = authority.sign("ops", "ops.example.org", user="ops") if shows else None
    keys = Keys(admin=frozenset(admin), secret="fleet")
    found = statuses(folder, authority, keys, own, key)
    assert found == {"/health": 200, "/admin/units": status, "/verbs/unit-0/load": status}


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}, {"x_forwarded_for": "1.2.3.4"}],
)
def test_a_browsers_or_a_proxys_certificate_is_not_that_of_whoever_uses_it(
    folder: Path, authority: Authority, headers: dict[str, str]
) -> None:
    own = authority.sign("ops", "ops.example.org")
    found = statuses(folder, authority, Keys(), own, **headers)
    assert (found["/admin/units"], found["/health"]) == (403, 200)


def test_a_certificate_of_another_authority(tmp_path: Path, folder: Path, authority: Authority) -> None:
    stranger = Authority(tmp_path, "stranger").sign("evil", "evil.example")
    assert statuses(folder, authority, Keys(), stranger) == {}


def test_a_certificate_that_cannot_be_read_ends_its_own_connection(
    folder: Path, authority: Authority
) -> None:
    own = authority.sign_garbage("ops")
    assert statuses(folder, authority, Keys(), own) == {}

    async def play() -> None:
        files = replace(authority.sign("cert"), client_ca=str(authority.file))
        async with served(folder, files) as (url, _):
            async with client(authority, own) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get(url)
            async with client(authority) as http:
                assert (await http.get(url)).text == "hello"

    run(play)


def test_certificates_that_cannot_be_kept_are_shown_all_the_same(
    folder: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        files = authority.sign("cert", "127.0.0.1", "first")
        async with served(folder, files) as (url, _):
            (folder / "tls.key").unlink()
            (folder / "tls.key").mkdir()
            authority.sign("cert", "127.0.0.1", "second")
            assert await shown(url, authority) == {"127.0.0.1", "second"}

    run(play)
    assert "cert.key is not kept for another gateway: Is a directory" in caplog.text


def test_a_file_that_does_not_come_to_its_end_holds_up_one_connection(
    folder: Path, authority: Authority
) -> None:
    """Others are shown what was read before."""

    async def play() -> None:
        files = authority.sign("cert", "127.0.0.1", "first")
        async with served(folder, files) as (url, _), asyncio.TaskGroup() as group:
            os.unlink(files.certificate)
            os.mkfifo(files.certificate)
            try:
                waiting = group.create_task(shown(url, authority))
                with await asyncio.to_thread(open, files.certificate, "w"):  # once it is being read
                    for _ in range(3):
                        assert await shown(url, authority) == {"127.0.0.1", "first"}
                    assert not waiting.done()
                assert await waiting == {"127.0.0.1", "first"}
            finally:  # lets whoever still waits for the other side go on
                os.close(os.open(files.certificate, os.O_RDWR | os.O_NONBLOCK))

    run(play)


def test_the_fleet_scheduler_reaches_a_gateway_behind_tls(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it can shake hands with nobody."""
    monkeypatch.setattr(TlsServer, "MOST_HANDSHAKES", 0)

    async def play() -> None:
        fleet = administered(keys=Keys(secret="fleet"), certified=True)
        async with served(folder, authority.sign("cert", "elsewhere.example"), fleet.app):
            state = await FleetClient(str(folder / "gateway"), secret="fleet").state()
            assert state.loads["unit-0"].free_blocks == 8

    run(play)
