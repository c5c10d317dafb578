"""A browser, and a fleet that it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from kvloom.config.config import DEMO
from tests.checkpoints import make_checkpoint
from tests.page.browser import chromium, started
from tests.processes import Fleet
from tests.serve.streaming import serving

KEY = "an-admin-key-of-the-test"
CONFIG = """
kv_memory: 48MiB
threads: 1
admin_key_file: {folder}/admin.keys
models: {{sums: {demo}/sums, plain: {plain}}}
units: [{{models: [sums], replicas: 2}}, {{models: [plain]}}]
"""


@dataclass(frozen=True)
class Served:
    fleet: Fleet
    url: str


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """While it is there an event loop runs in this thread, which other modules' tests would stumble over."""
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two units of a model that has a template, and one of a model that has none."""
    chromium()
    folder = tmp_path_factory.mktemp("page")
    plain = make_checkpoint(folder / "plain", "llama")
    (plain / "chat_template.jinja").unlink()
    keys = folder / "admin.keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    config = CONFIG.format(folder=folder, demo=DEMO, plain=plain)
    with serving(Path(folder), config) as (fleet, url):
        yield Served(fleet, url)
