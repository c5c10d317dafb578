"""Many units: what is to run, what runs, and the code that makes the second agree with the first."""
