"""A file of keys that have names: what each opens, and how much of it.

The file is YAML, a list of mappings. `kvloom key` writes it, people may edit it, and gateways read it again
when it changes. It holds no key, but of each a salt and a digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationError

from kvloom.config.fields import ConfigSection, Some, explain, no_bool, told_unread
from kvloom.types.files import replacing

PREFIX: Final = "kvl-"
SALT_BYTES: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET_BYTES: Final = 32
_FURTHEST: Final = 1 << 31  # what a request's priority, or a limit, may be
_LONGEST: Final = 256  # characters that are looked at, more than any key has
_ANEW: Final = "# `kvloom key` adds and takes away keys here; `models`, limits and the like may be edited.\n"
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, if there is one: of thousands of keys Python's own takes seconds."""


def check_key_name(name: str) -> str:
    """Raises ValueError if a key cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r}; letters, digits and `._-` are right, at most 64 and a letter or a digit first"
        )
    return name


def _hex(count: int) -> BeforeValidator:
    """Reads so many bytes, which the file writes as hexadecimal digits."""

    def read(value: Any) -> bytes:
        with suppress(TypeError, ValueError):
            if len(found := bytes.fromhex(value)) == count:
                return found
        raise ValueError(f"no {2 * count} hexadecimal digits; what `kvloom key create` writes is right")

    return BeforeValidator(read)


def _one_model(name: str) -> str:
    if not name or "," in name or any(letter.isspace() for letter in name):
        raise ValueError(
            f"{name[:80]!r}; one model's name is right, as `--models a --models b`, or `[a, b]` in the file"
        )
    return name


def _time(value: Any) -> datetime:
    """Reads a day or a time, which is in UTC if no other zone is said. A number, which could be a day as well
    as seconds since 1970, is none."""
    with suppress(ValueError, OverflowError):
        if isinstance(value, str) and not value.strip().isdigit():
            value = datetime.fromisoformat(value.strip())
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime.combine(value, time())
        if isinstance(value, datetime):
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    raise ValueError(f"{str(value)[:40]!r}; a time is right, as 2027-01-31 or 2027-01-31T12:00:00Z")


def _given(value: Any) -> Any:
    """Refuses a field without a value, which is easily taken for something else than no limit."""
    if value is None:
        raise ValueError("nothing; a value is right, or the field left out")
    return value


_Given = BeforeValidator(_given)
Limit = Annotated[Annotated[int, BeforeValidator(no_bool), Field(ge=1, lt=_FURTHEST)] | None, _Given]
ModelName = Annotated[str, AfterValidator(_one_model)]
Salt = Annotated[bytes, _hex(SALT_BYTES), PlainSerializer(bytes.hex)]
Digest = Annotated[bytes, _hex(32), PlainSerializer(bytes.hex)]


class NamedKey(ConfigSection):
    """Describes one key, and what it opens. None stands for no limit."""

    name: Annotated[str, AfterValidator(check_key_name)]
    salt: Salt
    hash: Digest
    models: Annotated[Annotated[tuple[ModelName, ...], Some] | None, _Given] = None
    """The models for which it may ask; None for all."""
    priority: Annotated[
        Annotated[int, BeforeValidator(no_bool), Field(ge=-_FURTHEST, lt=_FURTHEST)] | None, _Given
    ] = None
    """The most urgent priority that its requests may have."""
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrency: Limit = None
    """Requests that may run at the same time."""
    expires: Annotated[Annotated[datetime, PlainValidator(_time)] | None, _Given] = None
    """The time from which it opens nothing any more; in UTC if no other zone is said."""
    admin: bool = False
    """Whether it opens everything, as a key of `admin_key_file` does."""

    def expired(self, now: float) -> bool:
        """`now`: seconds since 1970, UTC."""
        return self.expires is not None and self.expires.timestamp() <= now


def digest(key: bytes, salt: bytes) -> bytes:
    """Returns what the file keeps of a key: its BLAKE2b digest (RFC 7693) of 32 bytes, salted.

    Slow digests, as scrypt's, are for passwords, which can be guessed. A key has 256 random bits, so that
    nobody guesses it however fast the digest is, and the digest is made anew for each request.
    """
    return hashlib.blake2b(key, digest_size=32, salt=salt, person=b"kvloom-key").digest()


_NOBODY: Final = bytes(SALT_BYTES), bytes(32)


def find_key(keys: Mapping[str, NamedKey], given: bytes) -> NamedKey | None:
    """Returns the key that was given, whether or not it has expired.

    A key tells its name, by which it is looked up. Whether there is that name takes the same work, so that
    the time that it takes tells nothing.
    """
    name, key = name_in(given), None
    if name is not None:
        key = keys.get(name)
    salt, kept = _NOBODY if key is None else (key.salt, key.hash)
    fits = hmac.compare_digest(digest(given[:_LONGEST], salt), kept)
    return key if fits else None


def name_in(given: bytes) -> str | None:
    """Returns the name that a key tells, whether or not there is such a key."""
    text = given.decode("latin-1")
    if not text.startswith(PREFIX):
        return None
    return text.removeprefix(PREFIX).rpartition("-")[0] or None


def make_key(name: str, **fields: Any) -> tuple[str, NamedKey]:
    """Returns a new key, and what a file keeps of it. fields: those of `NamedKey`. Raises ValueError."""
    text = f"{PREFIX}{name}-{secrets.token_hex(_SECRET_BYTES)}"
    salt = secrets.token_bytes(SALT_BYTES)
    kept = {"salt": salt.hex(), "hash": digest(text.encode(), salt).hex()}
    try:
        return text, NamedKey.model_validate({"name": name, **kept, **fields})
    except ValidationError as error:
        raise ValueError(explain(error, NamedKey, {})) from error


def read_key_text(path: Path) -> str:
    """Raises ValueError."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        right = f"a file that `kvloom key create NAME --file {path}` makes"
        raise ValueError(told_unread(path, error, right)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error


def parse_keys(text: str, path: Path) -> dict[str, NamedKey]:
    """Returns the keys by their names; there may be none. path: the file that errors name. Raises
    ValueError."""
    try:
        listed = yaml.load(text, _LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}: line {line}: {' '.join(str(error.problem).split())}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(listed or [], list):
        raise ValueError(f"{path}: no list; mappings that begin with `- name: NAME` are right")
    keys: dict[str, NamedKey] = {}
    for number, one in enumerate(listed or [], 1):
        try:
            key = NamedKey.model_validate(one)
        except ValidationError as error:
            raise ValueError(f"{path}: key {number}: {explain(error, NamedKey, {})}") from error
        if key.name in keys:
            raise ValueError(f"{path}: key {number}: {key.name!r} stands there twice; a name once is right")
        keys[key.name] = key
    return keys


def read_key_file(path: Path) -> dict[str, NamedKey]:
    """Raises ValueError."""
    return parse_keys(read_key_text(path), path)


def add_key(path: Path, key: NamedKey) -> None:
    """Adds a key at the end of the file, or makes the file, which its owner alone may read. Raises
    ValueError."""
    entry = key.model_dump(exclude_defaults=True)
    if key.models is not None:
        entry["models"] = list(key.models)
    written = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)

    def change(text: str) -> str:
        if key.name in parse_keys(text, path):
            raise ValueError(f"{path}: there is a key {key.name!r} already; another name is right")
        return (text or _ANEW) + ("" if text.endswith("\n") or not text else "\n") + written

    _rewrite(path, change, lambda keys: keys | {key.name: key})


def remove_key(path: Path, name: str) -> None:
    """Takes a key out of the file, and leaves all else as it is. Raises ValueError."""

    def change(text: str) -> str:
        item = _entry(path, text, name)
        lines = text.splitlines(keepends=True)
        del lines[item.start_mark.line : _last_line(item) + 1]
        return "".join(lines)

    _rewrite(path, change, lambda keys: {one: key for one, key in keys.items() if one != name})


def rotate_key(path: Path, name: str) -> str:
    """Gives a key another secret, and leaves all else as it is: its name, and so what it has used of its
    limits. Returns the key as its holder sends it. Raises ValueError."""
    secret, made = make_key(name)
    fields = {"salt": made.salt, "hash": made.hash}

    def change(text: str) -> str:
        values = [(key.value, value) for key, value in _entry(path, text, name).value if key.value in fields]
        for field, value in sorted(values, key=lambda one: one[1].start_mark.index, reverse=True):
            before, after = text[: value.start_mark.index], text[value.end_mark.index :]
            text = f"{before}'{fields[field].hex()}'{after}"
        return text

    _rewrite(path, change, lambda keys: keys | {name: keys[name].model_copy(update=fields)})
    return secret


def _entry(path: Path, text: str, name: str) -> yaml.MappingNode:
    """Returns where a key stands in the text. Raises ValueError if it does not."""
    if name not in (known := parse_keys(text, path)):
        raise ValueError(f"{path}: there is no key {name[:80]!r}; known are {', '.join(known) or 'none'}")
    listed = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(listed, yaml.SequenceNode)
    entry = listed.value[list(known).index(name)]
    assert isinstance(entry, yaml.MappingNode)
    return entry


def _last_line(node: yaml.Node) -> int:
    """Returns the number of the last line of a node, without the comments behind it."""
    if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and node.value and not node.flow_style:
        return _last_line(node.value[-1])
    line: int = node.end_mark.line
    return line


_Keys = dict[str, NamedKey]


def _rewrite(path: Path, change: Callable[[str], str], wanted: Callable[[_Keys], _Keys]) -> None:
    """Puts another file in the place of this one, at once and whole: who reads it meanwhile reads either.

    Commands that do so wait for each other. wanted: tells from the keys before those that must be there
    afterwards. Raises ValueError.
    """
    path = path.resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"{path.parent}: {error.strerror}; a folder is right") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = read_key_text(path) if path.exists() else ""
        changed = change(text)
        _check(path, changed, wanted(parse_keys(text, path)))
        _replace(path, changed)
        os.fsync(folder)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a file that can be written is right") from error
    finally:
        os.close(folder)


def _check(path: Path, text: str, wanted: _Keys) -> None:
    with suppress(ValueError):
        if parse_keys(text, path) == wanted:
            return
    raise ValueError(
        f"{path}: is not written as `kvloom key` can change it; "
        "a list is right, each key of which begins with a line `- name: NAME`"
    )


def _replace(path: Path, text: str) -> None:
    """Keeps the owner and the mode of the file that was there; a new one is its owner's alone."""
    with replacing(path) as made:
        if path.exists():
            before = path.stat()
            os.fchmod(made.fileno(), before.st_mode & 0o777)
            if before.st_uid != os.geteuid():
                os.fchown(made.fileno(), before.st_uid, before.st_gid)
        made.write(text.encode())
        made.flush()
        os.fsync(made.fileno())
