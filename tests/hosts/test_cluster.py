"""`kvloom serve --cluster` over hosts of a Ray cluster that `kvloom cluster` has made."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.hosts.hosts import Host

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
DEADLINE = 120.0
CONFIG = """\
host: 0.0.0.0
port: 8000
kv_memory: 48MiB
models: {{sums: {demo}/sums}}
units: [{{models: [sums], replicas: 3, threads: 1}}]
"""
CHAT = {
    "model": "sums",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def kvloom(host: Host, *arguments: str) -> str:
    return host.run(sys.executable, "-m", "kvloom.cli", *arguments, seconds=DEADLINE)
