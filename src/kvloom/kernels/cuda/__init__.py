"""The GPU kernels, in Triton. Each does what its twin in `kernels/reference.py` does, on the current stream.

This imports none of them: triton is an extra, and reads its environment when it is imported.
Each is a `Launcher`: a call launches the kernel; `NAME.launch` says how, for given tensors, by which
`python -m kvloom.kernels.cuda.compile` compiles it without a GPU.
"""
