"""Special cases: single architectures of transformers that need more than all others."""
