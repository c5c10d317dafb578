"""The CPU kernels in one place: float32, on torch tensors, on the calling thread's share of the cores."""

from kvloom.kernels.cpu.attention.decode import decode_attention
from kvloom.kernels.cpu.attention.prefill import prefill_attention
from kvloom.kernels.cpu.elementwise import rms_norm, rotate, write_kv

__all__ = ["decode_attention", "prefill_attention", "rms_norm", "rotate", "write_kv"]
