"""Drafts of tokens that may follow in a text: where they come from, and how many of them pay."""
