"""The experiments of papers, in virtual time."""
