"""Who calls, what the caller may do and how much of it, and what administrators have done."""
