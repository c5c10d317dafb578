"""Vectors for the kernels: sixteen lanes of float32 and of integers, as numba values."""
