"""What a fleet decides of its units: which of them give requests away, and when they come and go. All is pure."""
