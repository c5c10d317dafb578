"""`kvloom program`: what is asked of a gateway that serves already."""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom.config import read_keys
from kvloom.config_fields import parse_program
from kvloom.core.errors import ConfigError
from kvloom.core.spec import ProgramSpec

PATH: Final = "/admin/program"
SECONDS: Final = 30.0
LONGEST_ANSWER: Final = 1 << 20


class ServerError(Exception):
    """The server said no, or nothing. One line."""


class Gateway:
    """A running gateway at `url`. key_file: its API keys. Raises ConfigError where either cannot be used."""

    def __init__(self, url: str, key_file: Path | None) -> None:
        self._url = _base(url)
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if key_file is not None:
            self._headers["authorization"] = f"Bearer {_key(key_file)}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def program(self) -> ProgramSpec:
        """The one that it runs. Raises ServerError."""
        return self._call(None)

    def set_program(self, program: ProgramSpec) -> ProgramSpec:
        """From the next request on. Raises ServerError."""
        return self._call(msgspec.json.encode(program))

    def _call(self, body: bytes | None) -> ProgramSpec:
        try:
            request = urllib.request.Request(self._url + PATH, body, self._headers)
            with self._open(request, timeout=SECONDS) as response:
                return msgspec.json.decode(response.read(LONGEST_ANSWER), type=ProgramSpec)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self._url}: {_refusal(error)}") from error
        except (OSError, ValueError, HTTPException) as error:  # of the network, and of what came over it
            raise ServerError(f"{self._url}: {_problem(error)}; --url names another server") from error


def read_options(name: str, texts: Sequence[str]) -> ProgramSpec:
    """A program's name and its options, KEY=VALUE each; a value that is no JSON is a text. Raises
    ConfigError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals) or key == "name":
            raise ConfigError(f"--option {text}: KEY=VALUE is right, as `ratio=0.2`")
        if key in settings:
            raise ConfigError(f"--option {key}: given twice")
        settings[key] = _value(value)
    try:
        return parse_program({"name": name, **settings})
    except ValueError as error:
        raise ConfigError(f"program: {error}") from error


def show(program: ProgramSpec) -> str:
    """As it would be typed after `kvloom program set`."""
    options = ["--option " + shlex.quote(f"{key}={_text(value)}") for key, value in program.options.items()]
    return " ".join([program.name, *options])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: object) -> str:
    return value if isinstance(value, str) and _value(value) == value else json.dumps(value)


def _base(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"--url {url}: http://HOST:PORT is right")


def _key(file: Path) -> str:
    try:
        key = min(read_keys(file))
    except ValueError as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"--api-key-file: {file}: a key of ASCII letters, digits and signs is right")
    return key


def _refusal(error: urllib.error.HTTPError) -> str:
    """What the server said, as its errors do."""
    try:
        said = str(json.loads(error.read(LONGEST_ANSWER))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        said = f"status {error.code}"
    return " ".join(said.split())


def _problem(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(error, msgspec.MsgspecError):
        return f"answers, but not as kvloom does ({error})"
    if isinstance(reason, OSError) and reason.strerror:
        return f"cannot be reached: {reason.strerror}"
    return f"cannot be reached: {' '.join(str(reason).split()) or type(reason).__name__}"
