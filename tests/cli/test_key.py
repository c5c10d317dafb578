"""`kvloom key` makes keys that open, shows what they may, and revokes them."""

from __future__ import annotations

from pathlib import Path

from kvloom.config.keys import find_key, read_key_file
from tests.commands import kvloom


def test_a_keys_life(tmp_path: Path) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrency", "4"]
    made = kvloom(
        *("key", "create", "team-a", "--models", "chat", "--models", "code", "--priority", "-1"),
        *limits,
        *("--expires", "2027-01-31"),
        folder=tmp_path,
    )
    ops = kvloom("key", "create", "ops", "--admin", "--expires", "2020-01-31T12:00:00Z", folder=tmp_path)
    assert (made.returncode, ops.returncode) == (0, 0)
    keys = read_key_file(tmp_path / "keys.yaml")
    assert find_key(keys, made.stdout.strip().encode()) == keys["team-a"]
    assert find_key(keys, ops.stdout.strip().encode()) == keys["ops"]

    shown = kvloom("key", "list", folder=tmp_path).stdout
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["team-a", "chat,code", "-1", "60", "9000", "4", "2027-01-31T00:00:00Z"],
        ["ops", "all", "-", "-", "-", "-", "2020-01-31T12:00:00Z", "admin", "expired"],
    ]
    rotated = kvloom("key", "rotate", "team-a", folder=tmp_path)
    assert rotated.returncode == 0
    keys = read_key_file(tmp_path / "keys.yaml")
    assert find_key(keys, rotated.stdout.strip().encode()) == keys["team-a"]
    assert find_key(keys, made.stdout.strip().encode()) is None
    assert kvloom("key", "list", folder=tmp_path).stdout == shown
    assert kvloom("key", "revoke", "ops", folder=tmp_path).returncode == 0
    assert list(read_key_file(tmp_path / "keys.yaml")) == ["team-a"]
    assert kvloom("key", "list", "other.yaml", folder=tmp_path).returncode == 2


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (("create", "a b"), "name: 'a b'; letters, digits"),
        (("create", "a", "--concurrency", "0"), "concurrency: 0; 1 or more is right"),
        (("create", "a", "--expires", "soon"), "expires: 'soon'"),
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
