"""The page to look at: that of a fleet that serves, and that of a run that was recorded."""

from kvloom.page.assembly import PAGE_PATH, POLICY, recorded_page, served_files, uplot

__all__ = ["PAGE_PATH", "POLICY", "recorded_page", "served_files", "uplot"]
