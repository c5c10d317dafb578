"""Models added to a fleet and removed from it while it serves, and another config applied. Real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvloom.cli.gateway import Gateway, ServerError
from kvloom.cluster.models import Wanted
from kvloom.config.config import DEMO
from kvloom.types.spec import ModelSpec
from tests.processes import fleet
from tests.serve.test_units import ask

CONFIG = f"""
kv_memory: 16MiB
block_bytes: 4KiB
models: {{sums: {DEMO}/sums}}
"""


def test_a_model_comes_and_goes_and_a_config_is_applied(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    with fleet(str(tmp_path / "fleet.yaml")) as running:
        url = running.wait_until_ready()
        server = Gateway(url, None)
        assert [(one.name, one.units) for one in server.models()] == [("sums", {"unit-0": "up"})]
        before = running.children()

        made = server.add_model(ModelSpec(name="stories", path=str(DEMO / "stories")))
        assert made.units == {"unit-0": "up"}
        assert [ask(url, model) for model in ("stories", "sums")] == [200, 200]
        with pytest.raises(ServerError, match="there is a model stories already"):
            server.add_model(ModelSpec(name="stories", path="/elsewhere"))
        with pytest.raises(ServerError, match=r"unit-0 models\.wrong: .*/none: there is no such folder"):
            server.add_model(ModelSpec(name="wrong", path=str(tmp_path / "none")))
        assert [ask(url, model) for model in ("stories", "sums")] == [200, 200]

        server.remove_model("stories")
        assert [ask(url, model) for model in ("stories", "sums")] == [404, 200]

        [spec] = server.placement().units
        wanted = Wanted(engines=(spec, replace(spec, unit="unit-1")), first=("unit-0", "unit-1"))
        assert server.apply(wanted, really=False).changes == ("unit-1 is added, with sums",)
        assert server.apply(wanted, really=True).problems == ()
        assert server.models()[0].units == {"unit-0": "up", "unit-1": "up"}
        assert running.children()["gateway"] == before["gateway"]
        assert running.end(signal.SIGINT) == 0
