"""The `kvloom` command: a file for each thing that it does."""
