"""Offloaded attention (Weaver, section 4): one unit lends blocks to another unit's model and attends over
them.

The half in this folder needs no torch and is what the engine imports. It begins at two seams: `DecodePlanner`
in `planner.py` plans which rows of a decode step are computed elsewhere, and `CpuLoans.attend` in
`cpu/attention.py` (`CudaLoans` in `exec/cuda/offloaded.py`) gets their output. `memory/` has the memory that
both units see.
"""
