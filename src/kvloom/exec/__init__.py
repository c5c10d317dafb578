"""The executors: they load models, fuse them, and run jobs on CPUs and GPUs, on one rank or on several."""
