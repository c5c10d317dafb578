"""The wheel serves from an environment of its own, in a folder that is not the checkout."""

from __future__ import annotations

import json
import signal
import subprocess
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.deploy.installed import ROOT, SOURCE, build, copy_kernels, install, run
from tests.deploy.test_dockerfile import stages
from tests.processes import DEADLINE, fleet

NOT_SHIPPED: Final = {"__pycache__"}


class Installed(NamedTuple):
    """The wheel, and the environment in which it is installed."""

    sdist: Path
    wheel: Path
    bin: Path
    packages: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        patch.setenv("HOME", str(folder))
        sdist, wheel = build(folder / "dist")
        packages = install(wheel, folder / "venv")
        copy_kernels(packages)
        yield Installed(sdist, wheel, folder / "venv/bin", packages)


def test_it_has_each_file_of_the_package_and_the_licences(installed: Installed) -> None:
    files = [path for path in SOURCE.rglob("*") if path.is_file() and not NOT_SHIPPED & {*path.parts}]
    shipped = {f"kvloom/{path.relative_to(SOURCE)}" for path in files}
    assert {"kvloom/py.typed", "kvloom/page/uplot/LICENSE", "kvloom/demo/sums/config.json"} <= shipped
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == shipped
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "src/kvloom/page/uplot/LICENSE"}


def test_the_sdist_makes_the_same_wheel(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version is in it, so neither Git nor its history is needed."""
    with tarfile.open(installed.sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    [root] = tmp_path.glob("kvloom-*")
    monkeypatch.delenv("KVLOOM_DIST", raising=False)
    _, wheel = build(tmp_path / "dist", root)
    assert wheel.name == installed.wheel.name
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(installed.wheel).namelist()


def test_its_version_is_told(installed: Installed, tmp_path: Path) -> None:
    version = installed.wheel.name.split("-")[1]
    assert run(installed.bin / "kvloom", "--version", cwd=tmp_path) == f"kvloom {version}\n"


def test_nothing_of_the_checkout_is_found(installed: Installed, tmp_path: Path) -> None:
    told = run(
        installed.bin / "python", "-c", "import sys, kvloom; print(kvloom.__file__, *sys.path)", cwd=tmp_path
    ).split()
    assert Path(told[0]).is_relative_to(installed.packages)
    assert not [path for path in told if Path(path).is_relative_to(ROOT / "src")]
    for development in ("pytest", "ray", "openai"):
        command = [str(installed.bin / "python"), "-c", f"import {development}"]
        assert b"ModuleNotFoundError" in subprocess.run(command, check=False, capture_output=True).stderr


def test_it_serves_and_answers_as_the_image_starts_and_asks_it(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is the image's, at a free port."""
    image = dict(stages()[-1])
    [program], arguments = json.loads(image["ENTRYPOINT"]), json.loads(image["CMD"])
    assert arguments.pop(0) == "serve"
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    with fleet(*arguments, command=(str(installed.bin / program),)) as serving:
        port = serving.wait_until_ready().rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        python, *health = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
        run(installed.bin / python, *(word.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for word in health))
        question = {"role": "user", "content": "What is 17 + 25?"}
        body = json.dumps({"model": "sums", "temperature": 0, "messages": [question]}).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, DEADLINE) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "17 + 25 = 42."
        with urllib.request.urlopen(url, timeout=DEADLINE) as page:
            assert b"uPlot" in page.read()
        assert serving.end(signal.SIGTERM) == 0
    assert not [*here.iterdir()]
