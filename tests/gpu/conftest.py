"""Tests that need a GPU: `make gpu-check` runs them, and elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
