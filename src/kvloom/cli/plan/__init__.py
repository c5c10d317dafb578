"""`kvloom plan`, `kvloom replan` and `kvloom traffic`: plans, from files and from past traffic."""
