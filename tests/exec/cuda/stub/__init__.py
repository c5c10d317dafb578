"""A driver without a GPU: the real code of Triton's launcher and of cuda-bindings over a `libcuda.so.1` of
our own, whose kernels do nothing."""
