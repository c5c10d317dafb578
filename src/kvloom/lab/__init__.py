"""What is for finding out: beside the product, and never imported by it."""
