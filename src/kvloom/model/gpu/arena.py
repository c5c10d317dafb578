"""The arena on a device: the pool's bytes, in one allocation that peers on the host can map."""

from __future__ import annotations

import torch
from torch import Tensor

from kvloom.core.errors import ConfigError
from kvloom.kv.arena import view_blocks


class DeviceArena:
    """`blocks` × `block_bytes` bytes. Never resized: peers and recorded graphs hold its address."""

    def __init__(self, blocks: int, block_bytes: int, device: torch.device) -> None:
        """Raises ConfigError with the bytes that are wanted where the device does not have them."""
        self.blocks = blocks
        self.block_bytes = block_bytes
        size = blocks * block_bytes
        try:
            self.bytes: Tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_memory: {device} gives no {size:,} bytes in one piece for the pool; less is right"
            ) from error

    def view(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        """As one model sees it: [blocks, 2, tokens, head_dim]."""
        return view_blocks(self.bytes, self.block_bytes, head_dim, dtype)
