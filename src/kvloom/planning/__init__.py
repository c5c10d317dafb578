"""`kvloom plan`: from a cluster's file to a plan's."""
