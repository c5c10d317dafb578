"""A gateway that serves already, asked over HTTP."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import BadStatusLine, HTTPException, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvloom.cluster.models import AddModel, Applied, Apply, ModelState, Wanted
from kvloom.config.fields import read_keys, told_unread
from kvloom.journal.traffic import TrafficHour, decode_hours
from kvloom.types.errors import ConfigError
from kvloom.types.service import Admit, Drain, NodeState, Placement, ProgramState, RestartStep, UnitState
from kvloom.types.spec import EngineSpec, ModelSpec, ProgramSpec

KEY_VARIABLE: Final = "KVLOOM_ADMIN_KEY"
SECONDS: Final = 30.0
LONGEST_ANSWER: Final = 1 << 20
LONGEST_EVENT: Final = 32 << 20
LONGEST_LOG: Final = 1 << 30
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")

Answer = TypeVar("Answer")


class GatewayError(Exception):
    """The server said no, or nothing. The message is one line."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused` tells that the server said no, and will say so again."""
        super().__init__(message)
        self.refused = refused


class Silent(GatewayError):
    """A stream has told nothing for a while."""


class ServerEvent(NamedTuple):
    """A server-sent event."""

    kind: str
    id: str
    data: bytes


class Connection:
    """The way in which a server is asked: its address, a key, and the certificates on both sides."""

    def __init__(
        self,
        url: str,
        bearer: str | None,
        *,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        wants: str = "",
        remedy: str = "`kvloom serve` starts one, and --url names another",
    ) -> None:
        """`bearer` is the key that is sent. `ca` holds the authorities that may have signed the server's
        certificate, None for the system's; `certificate` and `key` are the caller's own. `wants` says how a
        key is given, and `remedy` what helps if there is no server. Raises ConfigError if one of these cannot
        be used."""
        self.url = _base(url)
        self._wants, self._remedy = wants, remedy
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if bearer:
            self._headers["authorization"] = f"Bearer {bearer}"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.url.startswith("https:") or ca or certificate or key:
            handlers.append(urllib.request.HTTPSHandler(context=_client_context(ca, certificate, key)))
        self._open = urllib.request.build_opener(*handlers).open

    def call(
        self, path: str, kind: type[Answer], body: object = None, seconds: float | None = SECONDS
    ) -> Answer:
        """Returns the answer of a path. Raises GatewayError."""
        with self.asked(path, body, seconds) as response:
            return msgspec.json.decode(response.read(LONGEST_ANSWER), type=kind)

    def stream(
        self, path: str, body: object = None, *, last: str = "", silence: float = SECONDS
    ) -> Generator[ServerEvent, None, None]:
        """Yields the server-sent events of a path until the server ends them. `last` is the id of the last
        event that is known. Raises GatewayError, or Silent if nothing comes for `silence` seconds."""
        heads = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
        with self.asked(path, body, silence, heads) as response:
            yield from _events(response, self.url)

    @contextmanager
    def asked(
        self, path: str, body: object, seconds: float | None, heads: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[HTTPResponse]:
        """Raises GatewayError, of what is read from the response too."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(f"{self.url}/{path}", data, {**self._headers, **heads})
            with self._open(request, timeout=seconds) as response:
                yield response
        except urllib.error.HTTPError as error:
            wants = f"; {self._wants}" if error.code == 401 and self._wants else ""
            raise GatewayError(f"{self.url}: {_refusal(error)}{wants}", refused=error.code < 500) from error
        except (OSError, ValueError, HTTPException) as error:  # of the network, and of what came over it
            remedy = _remedy(self.url, error) or self._remedy
            raise GatewayError(f"{self.url}: {_problem(error)}; {remedy}") from error


class AdminClient:
    """A client of a running gateway's administration."""

    def __init__(
        self,
        url: str,
        key_file: Path | None,
        *,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        """`key_file` holds admin keys; if it is left out, the environment's key is sent, if there is one. The
        others are those of `Connection`. Raises ConfigError if one of these cannot be used."""
        admin_key = os.environ.get(KEY_VARIABLE) if key_file is None else _read_key(key_file)
        if admin_key:
            admin_key = sendable(
                admin_key, KEY_VARIABLE if key_file is None else f"--admin-key-file: {key_file}"
            )
        wants = f"--admin-key-file FILE or ${KEY_VARIABLE} gives one"
        self._server = Connection(url, admin_key, ca=ca, certificate=certificate, key=key, wants=wants)

    def program(self) -> ProgramState:
        """Returns the router program that runs. Raises GatewayError."""
        return self._call("program", ProgramState)

    def set_program(self, program: ProgramSpec) -> ProgramState:
        """Sets the router program, from the next request on. Raises GatewayError."""
        return self._call("program", ProgramState, program)

    def units(self) -> list[UnitState]:
        """Raises GatewayError."""
        return self._call("units", list[UnitState])

    def order(self, unit: str, what: str, body: Drain | Admit) -> UnitState:
        """Orders `what` of a unit, and waits until it is done: drain, restart, admit, start, stop or remove.
        For the seconds of a `Drain` the unit's requests are waited for; if they are left out, for as long as
        the server is told to wait. Raises GatewayError."""
        path = f"units/{urllib.parse.quote(unit, safe='')}/{what}"
        return self._call(path, UnitState, body, seconds=None)

    def nodes(self) -> list[NodeState]:
        """Raises GatewayError."""
        return self._call("nodes", list[NodeState])

    def order_node(self, node: str, what: str, body: Drain | Admit) -> NodeState:
        """Orders `what` of a node, and waits until it is done: drain or admit. Raises GatewayError."""
        path = f"nodes/{urllib.parse.quote(node, safe='')}/{what}"
        return self._call(path, NodeState, body, seconds=None)

    def restart_all(self, seconds: float | None) -> Iterator[RestartStep]:
        """Yields the steps of a rolling restart, as they are done. Raises GatewayError."""
        with self._server.asked("admin/restart", Drain(seconds=seconds), None) as response:
            state = ""
            with suppress(ConnectionError, HTTPException):  # an end before the last chunk
                for line in response:
                    step = msgspec.json.decode(line, type=RestartStep)
                    state = step.state
                    yield step
            if state not in ("restarted", "failed"):
                raise GatewayError(
                    f"{self._server.url}: the gateway ended before the restart was over; ask again"
                )

    def placement(self) -> Placement:
        """Raises GatewayError."""
        return self._call("placement", Placement)

    def traffic(self) -> list[TrafficHour]:
        """Returns what the fleet was asked, by hour and model. Raises GatewayError."""
        with self._server.asked("admin/traffic", None, SECONDS) as response:
            return decode_hours(response.read(LONGEST_LOG))[0]

    def add(self, spec: EngineSpec) -> UnitState:
        """Adds a unit, and waits until it takes requests. Raises GatewayError."""
        return self._call("units", UnitState, spec, seconds=None)

    def models(self) -> list[ModelState]:
        """Returns the models of the fleet, and how the units that serve them stand. Raises GatewayError."""
        return self._call("models", list[ModelState])

    def add_model(self, model: ModelSpec, unit: str | None = None) -> ModelState:
        """Lets a unit serve another model, and waits until it does. If `unit` is None, it is the one whose
        models have the most room. Raises GatewayError."""
        return self._call("models", ModelState, AddModel(model=model, unit=unit), seconds=None)

    def remove_model(self, name: str, seconds: float | None = None) -> ModelState:
        """Lets no unit serve the model any more, once its requests have ended; `seconds` as of `Drain`.
        Raises GatewayError."""
        path = f"models/{urllib.parse.quote(name, safe='')}/remove"
        return self._call(path, ModelState, Drain(seconds=seconds), seconds=None)

    def apply(self, wanted: Wanted, *, really: bool) -> Applied:
        """Lets the fleet become what a config describes, and waits until it is; without `really`, only tells
        what would change. Raises GatewayError."""
        return self._call("config", Applied, Apply(wanted=wanted, really=really), seconds=None)

    def stream(
        self, path: str, *, last: str = "", silence: float = SECONDS
    ) -> Generator[ServerEvent, None, None]:
        """Yields the server-sent events of a path, as `Connection.stream` does. Raises GatewayError."""
        return self._server.stream(f"admin/{path}", last=last, silence=silence)

    def _call(
        self, path: str, kind: type[Answer], body: object = None, seconds: float | None = SECONDS
    ) -> Answer:
        return self._server.call(f"admin/{path}", kind, body, seconds)


def _events(response: HTTPResponse, url: str) -> Iterator[ServerEvent]:
    """Yields the events of a response. Raises Silent, and OSError and HTTPException of the network."""
    kind, name, data = "message", "", list[bytes]()
    while True:
        try:
            line = response.readline(LONGEST_EVENT)
        except TimeoutError as error:
            raise Silent(f"{url}: tells nothing any more") from error
        if not line:
            return
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            kind = value.decode(errors="replace")
        elif field == b"id":
            name = value.decode(errors="replace")
        elif field == b"data":
            data.append(value)
        elif not field and not value and line in (b"\n", b"\r\n"):
            if data:
                yield ServerEvent(kind, name, b"\n".join(data))
            kind, data = "message", []


def _base(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            base = parts.scheme + url[len(parts.scheme) :].rstrip("/")  # the scheme in small letters
            return base.removesuffix("/v1").rstrip("/")  # which clients of OpenAI's want behind it
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"--url {url}: http://HOST:PORT is right")


def _client_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Returns a context that verifies the server. Raises ConfigError that names the flag."""
    if key is not None and certificate is None:
        raise ConfigError(f"--key {key}: `--certificate` with the certificate for it is needed too")
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # also what OpenSSL says
        said = _unusable(ca, error, "certificates in PEM are right")
        raise ConfigError(f"--ca {said}") from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            given = f"--certificate {certificate}" + (f" --key {key}" if key else "")
            right = "a certificate and its key in PEM are right"
            if key is None and isinstance(error, ssl.SSLError):
                right = "if its key is in another file, --key FILE is needed too"
            raise ConfigError(_unusable(given, error, right)) from error
    return context


def _unusable(given: object, error: OSError, right: str) -> str:
    """Returns why files of certificates cannot be used; what OpenSSL says of them is an OSError too."""
    if isinstance(error, PermissionError):
        return told_unread(str(given), error, right)
    return f"{given}: {error.strerror or error}; {right}"


def _read_key(file: Path) -> str:
    try:
        return min(read_keys(file))
    except ValueError as error:
        raise ConfigError(f"--admin-key-file: {error}") from error


def sendable(key: str, origin: str) -> str:
    """Returns the key. Raises ConfigError, which names where the key is from, if no header can hold it."""
    if key.isascii() and key.isprintable():
        return key
    raise ConfigError(f"{origin}: a key of ASCII letters, digits and signs is right")


def _refusal(error: urllib.error.HTTPError) -> str:
    """Returns what the server said, as its errors do."""
    try:
        said = str(json.loads(error.read(LONGEST_ANSWER))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        said = f"status {error.code}"
    return " ".join(said.split())


def _remedy(url: str, error: Exception) -> str:
    """Returns what would be right if the server cannot be reached like this; empty if nobody can know."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "--ca FILE names the certificates of those who may have signed the server's"
    if isinstance(reason, ssl.SSLError) and reason.reason in _NO_TLS:
        return "it seems to speak no TLS, for which --url http://HOST:PORT is right"
    if url.startswith("http:") and isinstance(reason, ConnectionResetError | BadStatusLine):
        return "if it speaks TLS, --url https://HOST:PORT is right"
    if isinstance(reason, TimeoutError):
        return "it may still be loading its models, and --url names another server"
    return ""


def _problem(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(error, msgspec.MsgspecError):
        return f"answers, but not as kvloom does ({error})"
    if isinstance(reason, OSError) and reason.strerror:
        return f"cannot be reached: {reason.strerror}"
    return f"cannot be reached: {' '.join(str(reason).split()) or type(reason).__name__}"
