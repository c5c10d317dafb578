"""The transports there are."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NIXL = find_spec("nixl_cu13") is not None
KINDS = [
    "shm",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(not NIXL, reason="nixl-cu13 is not installed: pip install '.[cluster]'"),
    ),
]
