"""The policies of a fleet: which units give requests away, and when units come and go. All are pure
functions."""
