"""A file of keys that changes while it is served, and that may be broken."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvloom.api.access.keyring import LOOK_SECONDS, KeyFile, KeyRing
from kvloom.api.errors import RateLimited
from kvloom.config.keys import add_key, make_key, remove_key, rotate_key
from kvloom.types.clock import WallClock


class Follower:
    """Looks at a file of keys when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.kept = folder / "fleet" / "keys.kept"
        self.kept.parent.mkdir(exist_ok=True)
        self.file = KeyFile(self.path, self.kept)
        self.ring = KeyRing({})
        self.changes: list[tuple[list[str], list[str]]] = []

    def open(self) -> list[str]:
        self.ring = self.file.open()
        return list(self.ring.tenants)

    def look(self) -> list[str]:
        asyncio.run(self.file.read_again(self.ring, lambda *names: self.changes.append(names)))
        return list(self.ring.tenants)

    def add(self, name: str) -> bytes:
        text, key = make_key(name)
        add_key(self.path, key)
        return text.encode()


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return Follower(tmp_path)


def test_keys_come_and_go(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    a = follower.add("a")
    assert follower.open() == ["a"]
    before = follower.ring.tenants["a"]
    assert follower.look() == ["a"]
    b = follower.add("b")
    assert follower.ring.find(b) is None
    assert follower.look() == ["a", "b"]
    assert follower.ring.find(b) is follower.ring.tenants["b"]
    assert follower.ring.find(a) is before
    remove_key(follower.path, "a")
    assert follower.look() == ["b"]
    assert follower.ring.find(a) is None
    assert follower.changes == [(["a"], ["a", "b"]), (["a", "b"], ["b"])]


def test_who_gets_a_new_key_keeps_what_it_has_used(follower: Follower) -> None:
    old = follower.add("a")
    follower.open()
    tenant = follower.ring.tenants["a"]
    remove_key(follower.path, "a")
    new = follower.add("a")
    follower.look()
    assert follower.ring.find(old) is None
    assert follower.ring.find(new) is tenant


def test_a_rotated_key_keeps_what_it_has_used(follower: Follower) -> None:
    """Though the gateway looks at the file between each two steps."""
    text, key = make_key("a", requests_per_minute=2)
    add_key(follower.path, key)
    follower.open()
    tenant = follower.ring.find(text.encode())
    assert tenant is not None
    tenant.begin().end()
    for _ in range(2):
        old, text = text, rotate_key(follower.path, "a")
        follower.look()
        assert follower.ring.find(old.encode()) is None
        assert follower.ring.find(text.encode()) is tenant
    tenant.begin().end()
    with pytest.raises(RateLimited):
        tenant.begin()


@pytest.mark.parametrize("broken", ["- {", "name: a", "", None])
def test_a_broken_file_changes_nothing_and_is_told_once(
    follower: Follower, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    """An empty one is not broken: it is how all keys are revoked."""
    key = follower.add("a")
    follower.open()
    text = follower.path.read_text()
    if broken is None:
        follower.path.unlink()
    else:
        follower.path.write_text(broken)
    names = [follower.look() for _ in range(3)]
    assert names == ([[]] * 3 if broken == "" else [["a"]] * 3)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (0 if broken == "" else 1)
    assert all("the keys of before stay" in line and "\n" not in line for line in errors)
    assert all(key.decode() not in record.getMessage() for record in caplog.records)
    follower.path.write_text(text)
    assert follower.look() == ["a"]


def test_the_next_gateway_knows_the_keys_of_before(follower: Follower, tmp_path: Path) -> None:
    key = follower.add("a")
    follower.open()
    assert follower.kept.stat().st_mode & 0o777 == 0o600
    follower.path.write_text("- {")
    following = Follower(tmp_path)
    assert following.open() == ["a"]
    assert following.ring.find(key) is not None
    follower.path.write_text("")
    assert following.look() == []
    assert Follower(tmp_path).open() == []


def test_without_any_file_nobody_is_let_in(follower: Follower, caplog: pytest.LogCaptureFixture) -> None:
    assert follower.open() == []
    assert "nobody has one until the file is right" in caplog.text
    follower.add("a")
    assert follower.look() == ["a"]


def test_an_edit_of_the_same_length_at_the_same_time_is_seen(follower: Follower) -> None:
    follower.add("a")
    follower.open()
    stat = follower.path.stat()
    follower.path.write_text(follower.path.read_text().replace("name: a", "name: b"))
    os.utime(follower.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert follower.look() == ["b"]


def test_it_is_followed(follower: Follower) -> None:
    """Each second of a clock that does not wait."""
    follower.add("a")
    follower.open()
    slept: list[float] = []

    class Hasty(WallClock):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                follower.add("b")
            if len(slept) == 4:
                raise asyncio.CancelledError

    async def follow() -> None:
        await follower.file.follow(follower.ring, Hasty(), lambda *_: None)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow())
    assert slept == [LOOK_SECONDS] * 4
    assert list(follower.ring.tenants) == ["a", "b"]
