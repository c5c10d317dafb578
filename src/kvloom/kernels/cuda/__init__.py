"""The GPU kernels, in Triton. Each does what its twin in `kernels/reference.py` does, on the current stream.

This imports none of them: triton is an extra, and reads its environment when it is imported.
A function `NAME_launch` says how a kernel is launched for given tensors; `NAME` launches it, and
`python -m kvloom.kernels.cuda.compile` compiles it without a GPU.
"""
