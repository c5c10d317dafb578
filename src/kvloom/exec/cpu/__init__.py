"""The CPU executor: models loaded in float32, with packed and fused layers, and their forwards."""
