"""What a fleet decides of its units: which give requests away, and when they come and go. All is pure."""
