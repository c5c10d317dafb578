"""When the hub is asked whether it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvloom.serve.engine import require_hub
from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec


class Hub(BaseHTTPRequestHandler):
    """Knows of no model."""

    def do_HEAD(self) -> None:
        assert isinstance(self.server, Asked)
        self.server.paths.append(self.path)
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


class Asked(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.paths: list[str] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Asked]:
    with Asked() as server:
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def models(*paths: str) -> list[ModelSpec]:
    return [ModelSpec(name=f"m{at}", path=path) for at, path in enumerate(paths)]


def test_what_it_answers_is_for_the_loader_to_tell(hub: Asked) -> None:
    require_hub(models("some/model", "other/model"))
    assert hub.paths == [f"/{one}/model/resolve/main/config.json" for one in ("some", "other")]


def test_it_is_not_asked_for_what_is_here(hub: Asked, tmp_path: Path) -> None:
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").touch()
    require_hub(models(str(tmp_path), str(tmp_path / "model.gguf"), "some/model"))
    assert not hub.paths


def test_it_is_not_asked_when_that_was_forbidden(hub: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError,
        match=r"^models\.m0: some/model: is no folder .* cannot be reached \(",
    ):
        require_hub(models("some/model"))
    assert not hub.paths


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_one_that_cannot_be_reached_is_told(hub: Asked, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(
        ConfigError,
        match=r"^models\.m0: some/model: is no folder .* cannot be reached \(",
    ):
        require_hub(models("some/model"))
    assert not hub.paths


def test_it_is_asked_for_the_revision_that_is_pinned(hub: Asked, tmp_path: Path) -> None:
    """What is cached of another revision is none of it."""
    cached = tmp_path / "cache" / "models--some--model"
    for name, commit in (("main", "abc"), ("v1", "def")):
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / name).write_text(commit)
        (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    require_hub([ModelSpec(name="m", path="some/model", revision="v1")])
    assert hub.paths == ["/some/model/resolve/v1/config.json"]
