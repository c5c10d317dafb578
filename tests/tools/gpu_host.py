"""The CPU in a GPU's place for what `make gpu-check` measures; `python -m tests.tools.gpu_host` is one of its
units, with the host's memory as the device's."""

from __future__ import annotations

import torch
from tools.gpu_checks.models import Ground, Shape
from tools.gpu_checks.moving import main

from kvloom.exec.cuda.device import host_device
from kvloom.exec.cuda.operations import Operations, plain_operations
from tests.transfer.device_memory import SharedMemory

COMPUTE = 8
TINY = Shape(
    "Qwen3Config",
    {
        "vocab_size": 8192,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
)


def ground(operations: Operations | None = None) -> Ground:
    return Ground(host_device(COMPUTE), operations or plain_operations(), torch.float32, block_bytes=2048)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(ground, {"tiny": TINY}, lambda _: SharedMemory())
