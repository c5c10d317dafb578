"""The official client of a gateway on loopback, whose engine is the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from kvloom.api.app import create_app
from tests.api.scripted import ScriptedEngine, serving


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(create_app(engine)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
