"""Units that are drained and restarted under load, and a gateway that is killed meanwhile. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloom.cli.__main__ import main
from kvloom.config.config import DEMO
from tests.processes import DEADLINE, Fleet, fleet, leaves_nothing
from tests.serve.streaming import asking, call, states
from tests.serve.test_log_live import eventually

CONFIG = f"""
kv_memory: 32MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
units: [{{models: [sums], replicas: 2}}]
"""
KEYS = "api_key_file: api.txt\nadmin_key_file: admins.txt\n"
PROGRAM = """
async def mine(call, fleet, *, say: str = "mine"):
    async for frame in call.start_generate(fleet.turn()):
        yield frame
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the config and the model of `served` are."""
    folder = tmp_path_factory.mktemp("drain")
    shutil.copytree(DEMO / "sums", folder / "model")
    (folder / "fleet.yaml").write_text(CONFIG.replace(f"{DEMO}/sums", "./model"))
    return folder


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[tuple[Fleet, str]]:
    """A fleet and its URL, for tests that leave it as they found it."""
    with fleet(str(home / "fleet.yaml")) as running:
        yield running, running.wait_until_ready()
        assert running.end(signal.SIGTERM) == 0
        assert running.errors() == ""
        assert "failed" not in running.rest()


def kvloom(url: str, *words: str) -> int:
    return main([*words, "--url", url])


def listen(url: str, number: int) -> str:
    """The sum that was asked for; whatever goes wrong is in the text."""
    ask = {"messages": [{"role": "user", "content": f"What is {17 + number} + 25?"}], "temperature": 0}
    try:
        answer = call(url, "/v1/chat/completions", {"model": "sums"} | ask)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    text: str = answer["choices"][0]["message"]["content"]
    return text


def long_request(url: str, n: int) -> urllib.request.Request:
    """A stream of `n` choices, each as long as it can be: longer than an engine that ends would wait for."""
    [model] = call(url, "/v1/models")["data"]
    ask = {
        "model": "sums",
        "prompt": [5, 6],
        "max_tokens": model["max_model_len"] - 2,
        "ignore_eos": True,
        "n": n,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return asking(url, "/v1/completions", ask)


def listen_long(url: str) -> int:
    """How many tokens are missing in a long answer of several choices."""
    request = long_request(url, 16)
    asked: int = json.loads(request.data)["max_tokens"]  # type: ignore[arg-type]
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        lines = [line.removeprefix(b"data: ").strip() for line in response if line.strip()]
    assert lines[-1] == b"[DONE]", lines[-1]
    made: int = json.loads(lines[-2])["usage"]["completion_tokens"]
    return 16 * asked - made


@contextmanager
def load(url: str, threads: int = 3) -> Iterator[list[object]]:
    """Requests all the while, of which every single one is answered well: short ones, and two long streams at
    a time. Gives what was heard so far."""
    heard: list[object] = []
    over = threading.Event()

    def work(number: int) -> None:
        while True:
            heard.append(listen_long(url) if number > 0 else listen(url, 0))
            if over.wait(0.02):  # the cores are the fleet's too
                return

    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(work, number) for number in range(threads)]
        try:
            yield heard
        finally:
            over.set()
        for one in working:
            one.result()
    assert {*heard} == {0, "17 + 25 = 42."}


def test_restarts_under_load_lose_nothing(
    served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether another unit serves meanwhile or none."""
    running, url = served
    before = running.children()
    with load(url) as heard:
        assert kvloom(url, "unit", "restart", "unit-0") == 0
        assert capsys.readouterr().out.split()[:2] == ["unit-0", "up"]
        assert kvloom(url, "unit", "drain", "unit-0") == 0
        assert call(url, "/health")["units"] == {"unit-0": "drained", "unit-1": "up"}
        count = len(heard)
        eventually(lambda: len(heard) > count + 3, "answers of the other one")
        assert kvloom(url, "unit", "restart", "unit-1") == 0  # nobody else serves: requests wait
        assert kvloom(url, "unit", "admit", "unit-0") == 0
    after = running.children()
    assert not {before[unit] for unit in ("unit-0", "unit-1")} & {*after.values()}
    assert after["gateway"] == before["gateway"]
    assert states(url) == {"unit-0": "up", "unit-1": "up"}


def test_a_drained_unit_rests_until_it_is_admitted(
    served: tuple[Fleet, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the gateway is killed in between."""
    running, url = served
    with load(url):
        assert kvloom(url, "unit", "drain", "unit-1") == 0
        assert capsys.readouterr().out.split()[:4] == ["unit-1", "drained", "0", "calls"]
        made = jobs(url)
        assert {listen(url, number) for number in (0, 0, 0, 0)} == {"17 + 25 = 42."}
        assert jobs(url) == made
    kill_gateway(running)
    assert states(url) == {"unit-0": "up", "unit-1": "drained"}
    assert [listen(url, 0) for _ in range(4)] == ["17 + 25 = 42."] * 4
    assert jobs(url) == made
    assert kvloom(url, "unit", "admit", "unit-1") == 0
    assert states(url) == {"unit-0": "up", "unit-1": "up"}
    for _ in range(4):
        listen(url, 0)
    assert jobs(url) > made


def jobs(url: str) -> int:
    """That unit-1 has run."""
    load = call(url, "/verbs/unit-1/load")["models"]["sums"]
    made: int = load["prefill_jobs_total"] + load["decode_jobs_total"]
    return made


def kill_gateway(running: Fleet) -> None:
    os.kill(running.children()["gateway"], signal.SIGKILL)
    running.wait_for("gateway | answers again")


def test_a_program_outlives_its_gateway(
    served: tuple[Fleet, str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running, url = served
    module = home / "my_router.py"
    module.write_text(PROGRAM)
    assert kvloom(url, "program", "set", "my_router:mine", "--option", "say=here") == 0
    assert kvloom(url, "restart", "--rolling") == 0
    capsys.readouterr()
    assert kvloom(url, "program", "show") == 0
    assert capsys.readouterr().out == "my_router:mine --option say=here\n"
    assert listen(url, 0) == "17 + 25 = 42."
    module.write_text("raise SystemExit")
    assert kvloom(url, "restart", "--rolling") == 0
    capsys.readouterr()
    assert kvloom(url, "program", "show") == 0
    assert capsys.readouterr().out == "data_parallel\n"
    assert listen(url, 0) == "17 + 25 = 42."
    said = running.wait_for("it was set while serving")
    assert "my_router cannot be imported: SystemExit" in said
    assert "data_parallel runs again, as configured" in said


def test_a_new_process_that_cannot_be(
    served: tuple[Fleet, str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who asked for it learns why; the other unit serves, and this one again once it can."""
    running, url = served
    model = home / "model"
    right = (model / "config.json").read_text()
    (model / "config.json").write_text("{")
    assert kvloom(url, "unit", "restart", "unit-0") == 1
    said = capsys.readouterr().err
    assert "unit-0 models.sums: " in said
    assert said.count("\n") == 1
    assert states(url) == {"unit-0": "down", "unit-1": "up"}
    assert [listen(url, 0) for _ in range(2)] == ["17 + 25 = 42."] * 2
    (model / "config.json").write_text(right)
    running.wait_for("unit-0 | answers again")
    while states(url) != {"unit-0": "up", "unit-1": "up"}:
        pass


def test_the_end_waits_for_no_drain(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while one unit is drained for a restart, and a long request runs there."""
    folder = tmp_path / "s"
    folder.mkdir()
    with fleet(str(config), folder=folder) as running:
        url = running.wait_until_ready()
        with urllib.request.urlopen(long_request(url, 64), timeout=DEADLINE) as stream:
            stream.readline()
            ordering = [
                threading.Thread(target=kvloom, args=(url, "unit", "restart", unit))
                for unit in ("unit-0", "unit-1")
            ]
            for thread in ordering:
                thread.start()
            while "restarting" not in states(url).values():
                pass
            with leaves_nothing(running, folder):
                assert running.end(signal.SIGINT) == 0
            assert b"the server is stopping" in stream.read()  # it was long enough
        for thread in ordering:
            thread.join(DEADLINE)
        assert "the gateway is ending" in capsys.readouterr().err


def test_keys_of_two_kinds(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.with_name("api.txt").write_text("asker\n")
    admins = config.with_name("admins.txt")
    admins.write_text("admin\n")
    config.write_text(CONFIG.replace("replicas: 2", "replicas: 1") + KEYS)
    with fleet(str(config)) as running:
        url = running.wait_until_ready()
        ask = {"model": "sums", "prompt": "1", "max_tokens": 1}
        for key in ("asker", "admin"):
            assert call(url, "/v1/completions", ask, key)["choices"]
        for path in ("/admin/units", "/verbs/unit-0/load"):
            assert call(url, path, key="admin")
            for given, status in ((None, 401), ("asker", 403)):
                with pytest.raises(urllib.error.HTTPError, match=str(status)):
                    call(url, path, key=given)
        assert kvloom(url, "unit", "list") == 1
        assert "no admin key was given" in capsys.readouterr().err
        assert kvloom(url, "unit", "list", "--admin-key-file", str(admins)) == 0
        monkeypatch.setenv("KVLOOM_ADMIN_KEY", "asker")
        assert kvloom(url, "program", "show") == 1
        assert "an API key was given; this path needs an admin key" in capsys.readouterr().err
        assert running.end(signal.SIGTERM) == 0
