"""Plans: which models go together on which devices (MuxServe, sections 3.1 to 3.3)."""
