"""A folder for configs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints `model/` and `other/`, a folder without one `empty/`, and key files."""
    for name in ("model", "other", "empty"):
        (tmp_path / name).mkdir()
    for name in ("model", "other"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "keys.txt").write_text("# ours\n\nalpha\n beta \n")
    (tmp_path / "admins.txt").write_text("gamma")
    return tmp_path
