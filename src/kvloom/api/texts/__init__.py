"""From what a client sends to tokens: chat templates and tokenizers, in processes under limits."""
