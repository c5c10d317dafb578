"""What is fetched from a hub, and what is refused of it before its weights are."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvloom.exec.checkpoint import CONFIG, INDEX, WHOLE
from tests.checkpoints import make_checkpoint
from tests.exec.loading import load, refusal

COMMIT = "ab" * 20
API = "/api/models/some/model"


class Hub(ThreadingHTTPServer):
    """Has one model, with the files of a folder, at one commit. It notes which files are fetched."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder = folder
        self.fetched: set[str] = set()
        self.revisions: set[str] = set()

    @property
    def files(self) -> dict[str, Path]:
        return {str(file.relative_to(self.folder)): file for file in self.folder.rglob("*") if file.is_file()}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        if path.startswith(f"{API}/revision/") or path == API:
            self.server.revisions.add(path.rpartition("/")[2])
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"{API}/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif (name := path.removeprefix(f"/some/model/resolve/{COMMIT}/")) in files:
            if self.command == "GET":
                self.server.fetched.add(name)
            self.answer(files[name].read_bytes())
        else:
            self.send_error(404)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "there").mkdir()
    with Hub(make_checkpoint(tmp_path / "there", "qwen2")) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_what_a_model_is_made_of_is_fetched(hub: Hub) -> None:
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (hub.folder / "consolidated.safetensors").write_bytes(b"the same again")
    (hub.folder / "code.py").write_text("raise SystemExit")
    (hub.folder / "original").mkdir()
    (hub.folder / "original" / "params.json").write_text("{}")
    assert load("some/model", revision="v1").card.path == "some/model"
    assert {CONFIG, WHOLE, "tokenizer.json"} <= hub.fetched
    assert not hub.fetched & {"pytorch_model.bin", "consolidated.safetensors", "code.py"}
    assert "original/params.json" not in hub.fetched
    assert hub.revisions == {"v1"}
    hub.fetched.clear()
    assert load("some/model", revision=COMMIT).geometry.layers == 3
    assert not hub.fetched


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            INDEX,
            '{"weight_map": {"a": "../../../x.safetensors"}}',
            "names '../../../x.safetensors' for weights",
        ),
        (CONFIG, '{"num_hidden_layers": 1000000000}', "num_hidden_layers: 1000000000"),
    ],
)
def test_weights_are_not_fetched_for_what_is_refused(hub: Hub, file: str, text: str, said: str) -> None:
    (hub.folder / WHOLE).rename(hub.folder / "model-00001-of-00001.safetensors")
    (hub.folder / file).write_text(text)
    assert said in refusal("some/model")
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_shards_that_an_index_names(hub: Hub) -> None:
    (hub.folder / WHOLE).rename(hub.folder / "model-00001-of-00001.safetensors")
    places = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    (hub.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert load("some/model").geometry.layers == 3
