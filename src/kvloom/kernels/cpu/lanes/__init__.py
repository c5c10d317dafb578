"""What the kernels are written in: sixteen lanes of float32, and of integers, as numba values."""
