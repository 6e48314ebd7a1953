"""The cost of simulating a large training: `python -m benchmarks.simulation [NODES [SUPER_SAMPLES]]`.

By default, 1,000 nodes read 1,000 super-samples each, on one core. `stoker simulate scale` has smaller sizes, too.
"""

from __future__ import annotations

import sys

from stoker_sim._experiments.ours import measure_simulation, peak_bytes


def main(arguments: list[str]) -> int:
    """Print one line."""
    nodes, super_samples = (int(arguments[place]) if len(arguments) > place else 1_000 for place in (0, 1))
    seconds, run = measure_simulation(nodes, super_samples)
    print(
        f"{nodes:,} nodes x {super_samples:,} super-samples: {seconds:.0f} s of processor time, "
        f"{seconds / run.lookups * 1e6:.0f} us a fetch, {peak_bytes() / 1e6:.0f} MB at most, "
        f"{run.seconds:.0f} simulated seconds, stall {run.stall:.2%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
