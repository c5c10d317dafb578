"""The GGUF files that benchmarks ask kvloom and llama.cpp with: they are the checkpoint's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.make_gguf import ARCHITECTURES, make_gguf

from tests.checkpoints import make_checkpoint
from tests.exec.loading import load
from tests.exec.test_quantized_models import logits


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_gguf_file_is_its_checkpoint(architecture: str, tmp_path: Path) -> None:
    biases = {"attention_bias": False, "mlp_bias": False} if architecture == "llama" else {}
    source = make_checkpoint(tmp_path / "source", architecture, **biases)
    file = make_gguf(source, tmp_path / "model.gguf")
    ids = torch.arange(2, 40)
    torch.testing.assert_close(logits(load(file).module, ids), logits(load(source).module, ids))
