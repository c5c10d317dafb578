"""The lab is for finding out, beside the product: simulation, faults, workloads, benchmarks, reproduction."""
