"""What clients ask for and when: made, recorded, replayed; and what became of it."""
