"""The KV plane: one unit writes K and V straight into another's arena."""
