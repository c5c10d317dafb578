"""The kernels over paged KV: numba for CPUs, Triton for GPUs, and a plain torch twin of each."""
