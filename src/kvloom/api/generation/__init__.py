"""The common part of all APIs that generate: the request to an engine, and the answer out of its stream."""
