"""Cost models: how long jobs take on machines that were measured, and on devices that are only known by their
sheets."""
