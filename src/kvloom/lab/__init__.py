"""Workloads, benchmarks, profiles and reproduced papers: for finding out. The product never imports it."""
