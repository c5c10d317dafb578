"""The arena is memory of its own: a full /dev/shm does not touch it."""

from __future__ import annotations

import subprocess
import sys

import pytest

FULL = "mount -t tmpfs -o size=64k none /dev/shm && { head -c 1M /dev/zero > /dev/shm/full; true; }"
WRITE = """
import torch
from kvloom.kv.arena import Arena
arena = Arena(256, 16384)
arena.bytes.fill_(7)
view = arena.view(64, torch.float32)
print(tuple(view.shape), int(arena.bytes.long().sum()))
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    """In a mount namespace of its own, where /dev/shm is full."""
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-euc"]
    if subprocess.run([*namespace, FULL], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no mount namespaces")
    command = [*namespace, f'{FULL} 2>/dev/null; exec "$@"', "sh", sys.executable, "-c", WRITE]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split("\n")[0] == f"(256, 2, 32, 64) {7 * 256 * 16384}"
