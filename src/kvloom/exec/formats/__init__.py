"""Readers of quantised checkpoints of safetensors: compressed-tensors, GPTQ and AWQ."""
