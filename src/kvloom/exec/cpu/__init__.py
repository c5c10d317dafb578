"""The CPU executor: models that compute in float32, with packed and fused layers, and their
forwards."""
