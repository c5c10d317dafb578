"""What single architectures of transformers need beside the rest."""
