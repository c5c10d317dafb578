"""What several of the engine's tests share."""

from __future__ import annotations

import pytest

from tests.engine.real_fleet import Fleet, make_fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet"))
