"""Files of keys with names: what they say, how they are written, and what is refused in one line."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvloom.config.keys import add_key, find_key, make_key, read_key_file, remove_key, rotate_key
from tests.config.configs import load, refused

SAME = f"salt: '{'0' * 32}', hash: '{'0' * 64}'"
M = "models: {a: ./model}\n"
FIELDS: dict[str, Any] = {
    "models": ["chat", "7"],
    "priority": 0,
    "requests_per_minute": 5,
    "tokens_per_minute": 900,
    "concurrency": 2,
    "expires": "2027-01-31T12:00:00+02:00",
    "admin": True,
}


def added(file: Path, name: str, **fields: Any) -> str:
    text, key = make_key(name, **fields)
    add_key(file, key)
    return text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    full, plain = added(file, "full", **FIELDS), added(file, "1.5", expires="2027-01-31")
    keys = read_key_file(file)
    one, other = keys["full"], keys["1.5"]
    assert one.model_dump(exclude={"name", "salt", "hash"}) == FIELDS | {
        "models": ("chat", "7"),
        "expires": datetime(2027, 1, 31, 10, tzinfo=UTC),
    }
    assert (other.models, other.priority, other.concurrency, other.admin) == (None, None, None, False)
    assert other.expires == datetime(2027, 1, 31, tzinfo=UTC)
    assert not other.expired(other.expires.timestamp() - 1)
    assert other.expired(other.expires.timestamp())
    assert file.stat().st_mode & 0o777 == 0o600
    assert full not in file.read_text()
    assert plain.rpartition("-")[2] not in file.read_text()


def test_only_the_whole_key_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    text = added(file, "a-b").encode()
    added(file, "a")
    keys = read_key_file(file)
    assert find_key(keys, text) == keys["a-b"]
    secret = text.rpartition(b"-")[2]
    for wrong in (
        b"",
        b"kvl-",
        b"kvl-a-b-",
        text[:-1],
        text + b"0",
        text + bytes(300),
        text.upper(),
        b"kvl-a-" + secret,
        b"kvl-c-" + secret,
        secret,
        b"\xff" * 70_000,
    ):
        assert find_key(keys, wrong) is None


def test_two_keys_with_one_secret_have_digests_of_their_own(tmp_path: Path) -> None:
    _, one = make_key("a")
    _, other = make_key("a")
    assert one.salt != other.salt
    assert one.hash != other.hash


def test_an_edited_file_keeps_its_words(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    for name in ("a", "b", "c"):
        added(file, name, models=["x", "y"])
    text = (
        file.read_text()
        .replace("- name: b", "# the second\n- name: b")
        .replace("- name: c", "# third\n- name: c")
    )
    file.write_text("\ufeff" + text + "# the end")
    file.chmod(0o640)
    remove_key(file, "b")
    assert list(read_key_file(file)) == ["a", "c"]
    assert [line for line in file.read_text().splitlines() if line.startswith("#")][1:] == [
        "# the second",
        "# third",
        "# the end",
    ]
    added(file, "d")
    remove_key(file, "a")
    remove_key(file, "c")
    assert list(read_key_file(file)) == ["d"]
    remove_key(file, "d")
    assert read_key_file(file) == {}
    added(file, "e")
    assert list(read_key_file(file)) == ["e"]
    assert file.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link.yaml", tmp_path / "keys.yaml"
    added(file, "a")
    link.symlink_to(file)
    added(link, "b")
    assert link.is_symlink()
    assert list(read_key_file(file)) == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "# all\n- name: a\n  salt: 'SALT' # its salt\n  hash: 'HASH'\n  models: [x]\n"
        "# b's\n- name: b\n  hash: HASH\n  salt: SALT\n  concurrency: 2\n# the end",
        '- {name: a, hash: HASH, models: [x], salt: "SALT"}\n'
        "- {salt: SALT, name: b, hash: HASH, concurrency: 2}\n",
        "[{name: a, salt: SALT, hash: HASH, models: [x]}, {name: b, salt: SALT, hash: HASH, concurrency: 2}]",
    ],
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_rotated_key_keeps_all_but_its_secret(tmp_path: Path, text: str, name: str) -> None:
    file = tmp_path / "keys.yaml"
    old, key = make_key(name)
    text = text.replace("SALT", key.salt.hex()).replace("HASH", key.hash.hex())
    file.write_text(text)
    file.chmod(0o640)
    before = read_key_file(file)
    assert find_key(before, old.encode()) == before[name]
    new = rotate_key(file, name)
    keys = read_key_file(file)
    assert new.startswith(f"kvl-{name}-")
    assert find_key(keys, new.encode()) == keys[name]
    assert find_key(keys, old.encode()) is None
    assert keys[name] == before[name].model_copy(update={"salt": keys[name].salt, "hash": keys[name].hash})
    other = "b" if name == "a" else "a"
    assert (list(keys), keys[other]) == (["a", "b"], before[other])
    assert file.stat().st_mode & 0o777 == 0o640
    words = [line for line in file.read_text().splitlines() if "salt" not in line and "hash" not in line]
    assert words == [line for line in text.splitlines() if "salt" not in line and "hash" not in line]
    assert ("# its salt" in file.read_text()) == ("# its salt" in text)


def test_what_cannot_be_rotated_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    text = f"- &one {{{SAME}, name: a}}\n- {{<<: *one, name: b}}\n"
    file.write_text(text)
    for name, said in (
        ("z", "there is no key 'z'; known are a, b"),
        ("a", "is not written as `kvloom key` can change it"),  # it would change the other one too
        ("b", "is not written as `kvloom key` can change it"),
    ):
        with pytest.raises(ValueError, match=said):
            rotate_key(file, name)
    assert file.read_text() == text


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    names = [f"key-{number}" for number in range(12)]
    threads = [threading.Thread(target=added, args=(file, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_key_file(file)) == sorted(names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "no list; mappings that begin with `- name: NAME` are right"),
        ("- 5", "key 1: 5; a mapping is right"),
        ("- {name: a}", "key 1: salt: is missing (and 1 more error)"),
        ("- {SAME, nmae: b}", "key 1: nmae: unknown key; did you mean `name`? (and 1 more error)"),
        ("- {SAME, name: a, salt: 12}", "key 1: salt: no 32 hexadecimal digits"),
        ("- {SAME, name: a, concurrency: 0}", "key 1: concurrency: 0; 1 or more is right"),
        ("- {SAME, name: a, concurrency: }", "key 1: concurrency: nothing; a value is right"),
        ("- {SAME, name: a, tokens_per_minute: yes}", "tokens_per_minute: 'true'; a number is right"),
        ("- {SAME, name: a, models: []}", "models: []; at least one is right"),
        ("- {SAME, name: a, expires: soon}", "expires: 'soon'; a time is right, as 2027-01-31 or"),
        ("- {SAME, name: a, expires: 20270131}", "expires: '20270131'; a time is right"),
        ("- {SAME, name: a, expires: '0001-01-01T00:00:00+02:00'}", "expires: '0001-01-01"),
        ("- {SAME, name: a, models: ['b,c']}", "models.0: 'b,c'; one model's name is right"),
        ("- {SAME, name: a b}", "name: 'a b'; letters, digits and `._-` are right"),
        ("- {SAME, name: a}\n- {SAME, name: a}", "key 2: 'a' stands there twice"),
        ("- {SAME, name: a\n", "line 2: "),
        ("\x00", "unacceptable character"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(folder: Path, text: str, said: str) -> None:
    (folder / "keys.yaml").write_text(text.replace("SAME", SAME))
    message = refused(folder, M + "keys: keys.yaml")
    assert message.startswith(f"{folder}/fleet.yaml: keys: {folder}/keys.yaml: ")
    assert said in message


def test_what_a_config_may_say_of_keys(folder: Path) -> None:
    added(folder / "named.yaml", "a")
    config = load(folder, M + "keys: named.yaml\nshare_prefixes: key\naudit_file: audit.jsonl")
    assert (config.keys, config.share_prefixes) == (folder / "named.yaml", "key")
    assert config.audit_file == folder / "audit.jsonl"
    (folder / "named.yaml").write_text("")
    assert load(folder, M + "keys: named.yaml").keys == folder / "named.yaml"
    config = load(folder, M)
    assert (config.keys, config.share_prefixes, config.audit_file) == (None, "auto", None)
    assert "kvloom key create NAME --file" in refused(folder, M + "keys: none.yaml")
    assert "share_prefixes: 'some'; 'auto', 'all' or 'key' is right" in refused(
        folder, M + "share_prefixes: some"
    )
    for place in ("none/audit.jsonl", "model"):
        assert "a file in a folder that is there is right" in refused(folder, M + f"audit_file: {place}")


@pytest.mark.parametrize("text", ["[{SAME, name: a}]\n", "  - {SAME, name: a}\n"])
def test_a_file_that_cannot_be_changed_stays(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text.replace("SAME", SAME))
    with pytest.raises(ValueError, match="is not written as `kvloom key` can change it"):
        added(file, "b")
    assert file.read_text() == text.replace("SAME", SAME)


def test_names_stand_in_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{{SAME}, name: a}}\n")
    added(file, "b")
    assert list(read_key_file(file)) == ["a", "b"]
    with pytest.raises(ValueError, match="there is no key 'z'; known are a, b"):
        remove_key(file, "z")
    with pytest.raises(ValueError, match="there is a key 'a' already"):
        added(file, "a")


def test_a_byte_order_mark_is_no_part_of_a_key(folder: Path) -> None:
    (folder / "keys.txt").write_bytes(b"\xef\xbb\xbfalpha priority=1\nbeta\n")
    (folder / "admins.txt").write_bytes(b"\xef\xbb\xbfgamma")
    config = load(folder, M + "api_key_file: keys.txt\nadmin_key_file: admins.txt")
    assert config.api_keys() == {"alpha": 1, "beta": None}
    assert config.admin_keys() == {"gamma"}
