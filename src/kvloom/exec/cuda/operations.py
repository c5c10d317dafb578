"""The kernels that a forward on a device is made of: Triton's, or their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvloom.kernels import mailbox_reference, reference
from kvloom.kernels.cuda import reference as cuda_reference
from kvloom.kernels.cuda.flash import BlockTables, FlashAttention
from kvloom.kernels.reference import Activation


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations that the twins in `kernels/reference.py`, `kernels/mailbox_reference.py` and
    `kernels/cuda/reference.py` define. workspace: (q, lengths, kv_heads, multiprocessors, longest, window) →
    the parts in which a decode step's attention does its work, or None for whole sequences. flash:
    FlashAttention, which attends in place of both attention kernels if it is there and has room."""

    write_kv: Callable[..., None]
    decode_attention: Callable[..., None]
    prefill_attention: Callable[..., None]
    copy_pages: Callable[..., None]
    copy_blocks: Callable[..., None]
    block_tables: BlockTables
    advance: Callable[..., None]
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    gated: Callable[[Tensor, Activation], Tensor]
    quantized_product: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    scaled_product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    serve: Callable[..., None]
    post: Callable[..., None]
    collect: Callable[..., None]
    workspace: Callable[[Tensor, Tensor, int, int, int, int], Any]
    flash: FlashAttention | None = None


def plain_operations() -> Operations:
    """Returns the plain twins, which run on any device and in any dtype, at any speed."""

    def decode(*arguments: Any, workspace: None) -> None:
        reference.decode_attention(*arguments)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for x in (q, k):
            reference.rotate(x, cos, sin)

    def nothing(*_: object) -> None:
        return None

    return Operations(
        reference.write_kv,
        decode,
        reference.prefill_attention,
        reference.copy_pages,
        reference.copy_blocks,
        cuda_reference.block_tables,
        reference.advance,
        reference.rms_norm,
        cuda_reference.add_rms_norm,
        rotate,
        reference.gated,
        cuda_reference.quantized_product,
        cuda_reference.scaled_product,
        mailbox_reference.serve,
        mailbox_reference.post,
        mailbox_reference.collect,
        nothing,
    )


def triton_operations() -> Operations:
    """Returns Triton's kernels. They are imported here alone: triton reads its environment when it is
    imported."""
    from kvloom.kernels.cuda.copy import block_tables, copy_blocks, copy_pages
    from kvloom.kernels.cuda.decode import decode_attention, workspace
    from kvloom.kernels.cuda.elementwise import (
        add_rms_norm,
        advance,
        gated,
        rms_norm,
        rotate,
        write_kv,
    )
    from kvloom.kernels.cuda.offload_ask import collect, post
    from kvloom.kernels.cuda.offload_serve import serve
    from kvloom.kernels.cuda.prefill import prefill_attention
    from kvloom.kernels.cuda.quantized import quantized_product, scaled_product

    return Operations(
        write_kv,
        decode_attention,
        prefill_attention,
        copy_pages,
        copy_blocks,
        block_tables,
        advance,
        rms_norm,
        add_rms_norm,
        rotate,
        gated,
        quantized_product,
        scaled_product,
        serve,
        post,
        collect,
        workspace,
    )
