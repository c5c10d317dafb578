"""The memory that a lender and a borrower share: the mailbox, both of its ends, and the lent blocks."""
