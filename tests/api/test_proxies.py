"""Whom a request comes from if a proxy has brought it, and who is a proxy."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from kvloom.api.access.proxies import MOST_HOPS, UNKNOWN, TrustProxies, find_caller, read_address
from kvloom.api.auth import Keys
from tests.api.fleet import administered

PROXIES = ["127.0.0.1", "10.0.0.0/8", "fd00::/8"]
NETWORKS = [ip_network(one) for one in PROXIES]
NAME = "x-forwarded-for"


async def told(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse([*(scope["client"] or (None,))[:1], scope["scheme"]])(scope, receive, send)


def seen(peer: tuple[str, int] | None, *headers: tuple[str, str]) -> list[str | None]:
    """The client's address and the scheme that the application sees."""
    app = TestClient(TrustProxies(told, PROXIES), client=peer)  # type: ignore[arg-type]
    found: list[str | None] = app.get("/", headers=list(headers)).json()
    return found


@pytest.mark.parametrize(
    ("peer", "lines", "caller"),
    [
        ("127.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", ["9.9.9.9, 1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", ["9.9.9.9", "1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", ["1.2.3.4, 10.1.1.1 ,10.2.2.2"], "1.2.3.4"),
        ("127.0.0.1", ["10.1.1.1, 10.2.2.2"], "10.1.1.1"),
        ("127.0.0.1", ["1.2.3.4:5678"], "1.2.3.4"),
        ("127.0.0.1", ["[2001:db8::1]:443"], "2001:db8::1"),
        ("127.0.0.1", ["2001:db8::1, [fd00::2]"], "2001:db8::1"),
        ("127.0.0.1", ["fe80::1%eth0"], "fe80::1%eth0"),
        ("127.0.0.1", ["1.2.3.4, ::ffff:10.1.1.1"], "1.2.3.4"),
        ("127.0.0.1", ["::ffff:1.2.3.4"], "1.2.3.4"),
        ("::ffff:10.9.9.9", ["1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", [""], UNKNOWN),
        ("127.0.0.1", ["1.2.3.4, "], UNKNOWN),
        ("127.0.0.1", ["1.2.3.4, unknown"], UNKNOWN),
        ("127.0.0.1", ["nonsense, 1.2.3.4"], "1.2.3.4"),
        ("127.0.0.1", ["1.2.3.4, [fd00::2"], UNKNOWN),
        ("127.0.0.1", ["1.2.3.4, 010.0.0.1"], UNKNOWN),
        ("11.0.0.1", ["1.2.3.4"], "11.0.0.1"),
        ("::1", ["1.2.3.4"], "::1"),
        ("somewhere", ["1.2.3.4"], "somewhere"),
    ],
)
def test_the_last_address_that_is_no_proxys(peer: str, lines: list[str], caller: str) -> None:
    assert seen((peer, 5), *((NAME, line) for line in lines)) == [caller, "http"]


def test_a_unix_sockets_caller_stays_one() -> None:
    assert seen(None, (NAME, "1.2.3.4")) == [None, "http"]


@pytest.mark.parametrize(
    ("peer", "said", "scheme"),
    [
        ("127.0.0.1", "https", "https"),
        ("127.0.0.1", "http, HTTPS", "https"),
        ("127.0.0.1", "ftp", "http"),
        ("1.2.3.4", "https", "http"),
    ],
)
def test_the_scheme_that_a_proxy_was_called_by(peer: str, said: str, scheme: str) -> None:
    assert seen((peer, 5), ("x-forwarded-proto", said))[1] == scheme


ADDRESSES = st.ip_addresses().map(str)
INNER = st.sampled_from(["127.0.0.1", "10.7.7.7", "fd00::7", "[fd00::8]:80", "10.7.7.8:80"])
OUTER = ADDRESSES.filter(lambda text: not any(ip_address(text) in network for network in NETWORKS))


@given(st.lists(st.text(max_size=9) | ADDRESSES, max_size=5), OUTER, st.lists(INNER, max_size=MOST_HOPS - 2))
def test_what_a_caller_writes_changes_nothing(forged: list[str], caller: str, inner: list[str]) -> None:
    """Proxies that we trust have put the caller's address and their own behind whatever it has sent."""
    found = find_caller([", ".join([*forged, caller, *inner])], NETWORKS)
    assert found == str(read_address(caller))


@given(st.text(max_size=200))
def test_any_text_is_an_address_or_none(text: str) -> None:
    address = read_address(text)
    assert address is None or ip_address(str(address)) == address


@pytest.mark.parametrize("line", ["10.0.0.1," * 7000, "," * 65_000, "1" * 65_000])
def test_endless_lists(line: str) -> None:
    assert find_caller([line], NETWORKS) == UNKNOWN
    assert find_caller([line + "1.2.3.4"], NETWORKS) == ("1.2.3.4" if line.endswith(",") else UNKNOWN)


@pytest.mark.parametrize("said", [None, "127.0.0.1", "::1", "1.2.3.4", "unknown", ""])
@pytest.mark.parametrize("path", ["/admin/units", "/verbs/unit-0/load"])
def test_a_proxy_on_this_machine_is_no_caller_on_this_machine(said: str | None, path: str) -> None:
    app = administered(keys=Keys(), proxies=["127.0.0.1"]).app
    headers = {} if said is None else {NAME: said}
    for peer, status in (("127.0.0.1", 403), ("127.0.0.2", 200)):
        http = TestClient(app, base_url="http://localhost", client=(peer, 5))
        assert http.get(path, headers=headers).status_code == status
