"""Whole-process timings, side by side with what a user would do instead: python -m tests.benchmarks."""
