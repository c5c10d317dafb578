"""The command as people type it: exit codes, and errors of one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli.app import COMMANDS, make_app
from kvloom.config.config import Config
from tests.commands import kvloom


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["a command is missing; known are serve, chat"]),
        (("-x",), ["'-x'; known are serve, chat, run, models"]),
        (("unit", "lst"), ["lst", '"list"', "`kvloom unit --help`"]),
        (("unit", "list", "more"), ["more", "`kvloom unit list --help`"]),
        (("serv",), ["there is no command 'serv'; did you mean `serve`?"]),
        (("serve", "--prot", "1"), ["--prot", "`kvloom serve --help`"]),
        (("serve", "--port", "x"), ["--port: 'x'; a whole number is right"]),
        (("serve", "--port", "81.5"), ["--port: '81.5'; a whole number is right"]),
        (("chaos", "--replay", "1e3"), ["--replay: '1e3'; a whole number is right"]),
        (("serve", "--port", "70000"), ["--port", "70000", "65535"]),
        (("serve", "--kv-memory", "much"), ["--kv-memory", "'much'", "512MiB"]),
        (("serve", "--kv-memory", "900TiB"), ["--kv-memory", "available"]),
        (("serve", "--policy", "lifo"), ["--policy", "'adbs'"]),
        (("serve", "--model", "x"), ["--model x", "NAME=PATH_OR_HUB_ID"]),
        (("serve", "--model", "a=b/c", "--model", "a=d/e"), ["--model a", "twice"]),
        (("serve", "--model", "a=./nowhere"), ["--model a", "nowhere", "does not exist"]),
        (("serve", "--api-key-file", "/dev/null"), ["--api-key-file", "no key"]),
        (("serve", "--admin-key-file", "/dev/null"), ["--admin-key-file", "no key"]),
        (("serve", "--host", "no.such.host.invalid"), ["host", "no.such.host.invalid"]),
        (("serve", "--host", "two..dots"), ["host", "two..dots", "an address of this machine"]),
        (("serve", "--host", "203.0.113.1"), ["host", "203.0.113.1", "is not this machine"]),
        (("serve", "nowhere.yaml"), ["nowhere.yaml", "No such file"]),
        (("program",), ["known are set, show", "`kvloom program --help`"]),
        (("program", "set"), ["NAME", "`kvloom program set --help`"]),
        (("program", "show", "--ulr", "x"), ["--ulr", "`kvloom program show --help`"]),
        (("program", "show", "--url", "localhost:8000"), ["--url localhost:8000", "http://HOST:PORT"]),
        (("program", "show", "--url", "http://h:port"), ["--url http://h:port", "http://HOST:PORT"]),
        (("program", "show", "--admin-key-file", "/dev/null"), ["--admin-key-file", "no key"]),
        (("unit",), ["a command is missing", "`kvloom unit --help`"]),
        (("unit", "drain"), ["NAME", "`kvloom unit drain --help`"]),
        (("unit", "drain", "unit-0", "--seconds", "x"), ["--seconds", "'x'"]),
        (
            ("unit", "drain", "unit-0", "--seconds", "-3"),
            ["--seconds: '-3'; seconds from 0 to 3600 are right"],
        ),
        (("unit", "stop", "unit-0", "--seconds", "nan"), ["--seconds: 'nan'; seconds from 0 to 3600"]),
        (("restart", "--rolling", "--seconds", "3601"), ["--seconds: '3601'; seconds from 0 to 3600"]),
        (("program", "set", "a b"), ["program", "'a b'", "module:function"]),
        (("program", "set", "balanced", "--option", "ratio"), ["--option ratio", "KEY=VALUE"]),
        (("program", "set", "balanced", "--option", "name=x"), ["--option name=x", "KEY=VALUE"]),
        (("program", "set", "balanced", "--option", "a=1", "--option", "a=2"), ["--option a", "twice"]),
        (("program", "set", "balanced", "--option", "a={}"), ["program: a: {}", "a number"]),
        (("chaos", "--seeds", "0"), ["--seeds: 0", "1 or more"]),
        (("chaos", "--first", "-1"), ["kvloom: --first: -1; a seed of 0 or more"]),
        (("chaos", "--replay", "-2"), ["kvloom: --replay: -2; a seed of 0 or more"]),
        (("chaos", "--jobs", "0"), ["--jobs: 0", "1 to"]),
        (("chaos", "--replay", "x"), ["--replay: 'x'; a whole number is right"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: tuple[str, ...], parts: list[str]) -> None:
    done = kvloom(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for part in ("kvloom: ", *parts):
        assert part in done.stderr


def test_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = kvloom("serve", "--port", str(port), "--model", f"a={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvloom: port: {port} at 127.0.0.1: address already in use; another")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "config.json").write_text("{}")
        file.write_text(f"port: {port}\nmodels: {{a: .}}\n")
        named = kvloom("serve", str(file))
        given = kvloom("serve", str(file), "--port", str(port))
    assert named.stderr.startswith(f"kvloom: {file}: port: {port} at 127.0.0.1: address already in use")
    assert given.stderr.startswith(f"kvloom: port: {port} at 127.0.0.1: address already in use")


def test_version_and_help() -> None:
    command = [sys.executable, "-m", "kvloom.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("kvloom ")
    shown = kvloom("serve", "--help")
    assert shown.returncode == 0
    for key in Config.model_fields:
        assert f"\n  {key}:" in shown.stdout


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_every_command_says_what_it_does(name: str) -> None:
    shown = kvloom(name, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: kvloom {name} ")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert name in kvloom("--help").stdout


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_every_whole_number_is_read_alike(name: str) -> None:
    """cyclopts by itself rounds 81.5 to 82."""
    apps = [make_app(name)[name]]
    while apps:
        app = apps.pop()
        apps += [app[one] for one in app if not one.startswith("-")]
        for argument in app.assemble_argument_collection() if app.default_command else ():
            if argument.hint in (int, int | None):
                assert argument.parameter.converter is not None, argument.name


def test_an_option_given_again_counts_the_last_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    twice = kvloom("serve", "--port", "1", "--port", "70000", "--model", f"a={tmp_path}")
    assert (twice.returncode, "--port: 70000" in twice.stderr) == (2, True)


def test_only_the_command_that_is_called_is_imported() -> None:
    code = (
        "import sys; from kvloom.cli.app import COMMANDS, run; run(['--version']); run(['--help']); "
        "unwanted = {place.partition(':')[0] for _, place, _ in COMMANDS} | {'pydantic', 'aiohttp'}; "
        "print((unwanted - {'kvloom.cli.app'}) & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "module",
    [
        "kvloom.cli.app",
        "kvloom.cli.profile",
        "kvloom.serve.supervisor",
        "kvloom.serve.gateway_process",
        "kvloom.serve.scheduler_process",
    ],
)
def test_no_torch_outside_the_engine(module: str) -> None:
    code = f"import sys, {module}, kvloom.config.file; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_completed(shell: str) -> None:
    done = kvloom("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    for name, *_ in COMMANDS:
        assert name in done.stdout


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "kvloom.bash"
    script.write_text(kvloom("completion", "bash").stdout)
    ask = (
        f'source {script}; complete_words() {{ COMP_WORDS=(kvloom "$@"); COMP_CWORD=$#; COMPREPLY=(); '
        '_kvloom; echo "${COMPREPLY[*]}"; }; complete_words cha; complete_words chat --max; '
        "complete_words completion z"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["chat chaos", "--max-tokens", "zsh"]
