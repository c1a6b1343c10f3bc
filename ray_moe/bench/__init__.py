"""Benchmarks: ratios of two things measured in one run, results as JSON."""
