"""Which unit a request goes to, and which to which running ones move: pure functions over load reports."""
