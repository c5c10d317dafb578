"""`kvloom key` makes keys that open, shows what they may, and revokes them."""

from __future__ import annotations

from pathlib import Path

from kvloom.config.keys import add_key, find_key, make_key, read_key_file
from tests.commands import kvloom


def test_a_keys_life(tmp_path: Path) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrency", "4"]
    made = kvloom(
        *("key", "create", "team-a", "--models", "chat", "--models", "code", "--priority", "-1"),
        *limits,
        *("--expires", "2099-01-31"),
        folder=tmp_path,
    )
    assert made.returncode == 0
    add_key(tmp_path / "keys.yaml", make_key("ops", admin=True, expires="2020-01-31T12:00:00Z")[1])
    keys = read_key_file(tmp_path / "keys.yaml")
    assert find_key(keys, made.stdout.strip().encode()) == keys["team-a"]

    shown = kvloom("key", "list", folder=tmp_path).stdout
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["team-a", "chat,code", "-1", "60", "9000", "4", "2099-01-31T00:00:00Z"],
        ["ops", "all", "-", "-", "-", "-", "2020-01-31T12:00:00Z", "admin", "expired"],
    ]
    rotated = kvloom("key", "rotate", "team-a", folder=tmp_path)
    assert rotated.returncode == 0
    keys = read_key_file(tmp_path / "keys.yaml")
    assert find_key(keys, rotated.stdout.strip().encode()) == keys["team-a"]
    assert find_key(keys, made.stdout.strip().encode()) is None
    for named in ((), ("keys.yaml",), ("--file", "keys.yaml")):
        assert kvloom("key", "list", *named, folder=tmp_path).stdout == shown
    assert kvloom("key", "revoke", "ops", folder=tmp_path).returncode == 0
    assert list(read_key_file(tmp_path / "keys.yaml")) == ["team-a"]
    assert kvloom("key", "list", "other.yaml", folder=tmp_path).returncode == 2


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (("create", "a b"), "name: 'a b'; letters, digits"),
        (("create", "a", "--concurrency", "0"), "concurrency: 0; 1 or more is right"),
        (("create", "a", "--concurrency", "2.5"), "--concurrency: '2.5'; a whole number is right"),
        (("create", "a", "--requests-per-minute", "60.7"), "--requests-per-minute: '60.7'; a whole number"),
        (("create", "a", "--models", "b,c"), "'b,c'; one model's name is right, as `--models a --models b`"),
        (("create", "a", "--models", ""), "''; one model's name is right"),
        (("create", "a", "--models", "b c"), "'b c'; one model's name is right"),
        (("create", "a", "--expires", "soon"), "expires: 'soon'; a time is right, as 2027-01-31 or 2027-"),
        (("create", "a", "--expires", "20270131"), "expires: '20270131'; a time is right, as 2027-01-31"),
        (("create", "a", "--expires", "5"), "expires: '5'; a time is right"),
        (("create", "a", "--expires", "2020-01-31"), "--expires: '2020-01-31' is over; a time to come"),
        (("create", "a", "--file", "none/keys.yaml"), "none: No such file or directory; a folder is right"),
        (("list", "none.yaml"), "none.yaml: No such file or directory; a file that `kvloom key create"),
        (("revoke", "a"), "there is no key 'a'; known are none"),
        (("rotate", "a"), "there is no key 'a'; known are none"),
    ):
        ended = kvloom("key", *arguments, folder=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert said in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
