"""Products over weights of 4, 6 and 8 bits: the panels that they are packed in, and the rows for them."""
