"""A decode step whose K and V lie in part with another unit, at both of its ends (Weaver, section 4)."""
