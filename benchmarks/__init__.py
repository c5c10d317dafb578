"""Benchmarks: kvloom beside its peers, and kvloom's own costs. Run by hand, on a quiet machine.

python -m benchmarks runs all of it; each module runs alone too (python -m benchmarks.throughput --help).
"""
