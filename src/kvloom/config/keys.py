"""Files of keys, one a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_PRIORITY: Final = re.compile(r"priority=([+-]?\d{1,10})")
_FURTHEST: Final = 1 << 31  # what a request's priority may be


def read_keys(path: Path) -> frozenset[str]:
    """Returns the keys in the file, without empty lines and lines that start with #. Raises ValueError."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a text file with one key a line is right") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; one key a line is right") from error
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} holds no key; one key a line is right")
    return keys


def read_api_keys(path: Path) -> dict[str, int | None]:
    """Returns each key with the most urgent priority that its requests may have, which a line tells as
    `KEY priority=-1`; None stands for any priority. Raises ValueError."""
    found: dict[str, int | None] = {}
    for line in sorted(read_keys(path)):
        key, *rest = line.split()
        if key in found:
            raise ValueError(f"{path}: {_shown(key)} stands there twice; one line for each key is right")
        found[key] = _priority(path, key, rest)
    return found


def _shown(key: str) -> str:
    """Names the key by enough of it to find it, and by no more than a quarter."""
    return f"the key {key[: min(4, len(key) // 4)]}…"


def _priority(path: Path, key: str, rest: list[str]) -> int | None:
    if not rest:
        return None
    said = _PRIORITY.fullmatch(" ".join(rest))
    if said is None or not -_FURTHEST <= int(said[1]) < _FURTHEST:
        raise ValueError(f"{path}: {_shown(key)} has more behind it; nothing, or `priority=-1`, is right")
    return int(said[1])
