"""A model's shape: all that its cost depends on."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvloom.core.geometry import Geometry

_Count = Annotated[int, Meta(ge=1, lt=2**31)]


class ModelShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder of `layers` like layers. gated: the MLP has three matrices, not two. tied: the head is the
    embedding. itemsize: bytes of a weight, and of a number in the KV cache. experts: MLPs of a layer, each
    `ffn` wide, of which a token goes through `active`."""

    layers: Annotated[int, Meta(ge=1, lt=4096)]
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    head_dim: _Count
    ffn: _Count
    vocab: _Count
    itemsize: Literal[1, 2, 4] = 2
    gated: bool = True
    tied: bool = False
    experts: _Count = 1
    active: _Count = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that no decoder has."""
        if self.kv_heads > self.heads or self.active > self.experts:
            raise ValueError(
                f"{self.kv_heads} KV heads of {self.heads} heads, {self.active} of {self.experts} experts"
            )

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's q, k, v and output matrices."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Weights of one MLP."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def geometry(self, block_bytes: int) -> Geometry:
        return Geometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            itemsize=self.itemsize,
            block_bytes=block_bytes,
        )
