"""The parts of a model's answer beside plain text, as its chat template tells them: thoughts, and calls of
tools."""
