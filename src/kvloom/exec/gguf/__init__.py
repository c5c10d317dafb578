"""Models in one GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
