"""What all APIs share that generate: what an engine is asked, and how its stream is answered."""
