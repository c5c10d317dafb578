"""Files that are there, but not for the user who reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloom.config.fields import read_keys
from kvloom.config.file import read_yaml
from kvloom.config.keys import read_key_file
from kvloom.config.tls import TlsFiles, server_context
from kvloom.types.errors import ConfigError

NOBODY = 65_534


@contextmanager
def unprivileged() -> Iterator[int]:
    """Gives the number of a user who is not root, as whom the block runs."""
    before = os.geteuid()
    if before:
        yield before
        return
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(before)


@pytest.mark.parametrize(
    "read",
    [read_keys, read_key_file, read_yaml, lambda file: server_context(TlsFiles(str(file), str(file)))],
)
def test_who_must_be_able_to_read_a_file_is_told(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "file"
    file.touch(0)
    with unprivileged() as number, pytest.raises((ValueError, ConfigError)) as error:
        read(file)
    assert f"{file}: Permission denied; readable by " in str(error.value)
    assert f"uid {number}" in str(error.value)
