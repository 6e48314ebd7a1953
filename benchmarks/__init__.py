"""What stoker costs and how well it does, measured: `python -m benchmarks` runs all."""
