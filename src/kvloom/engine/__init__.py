"""The engine of one unit: it admits, queues and batches requests, and carries tokens to their streams. No
torch here."""
