"""Real models: transformers' own code with our attention, fused projections, and the torch executor."""
