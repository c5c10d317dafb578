"""One unit's engine: admits, queues, batches, and carries tokens to their streams. No torch here."""
