"""Words that cross the borders of packages."""
