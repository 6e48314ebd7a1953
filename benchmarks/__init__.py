"""Benchmarks of stoker's speed and cost: `python -m benchmarks` runs all."""
