"""Times to the first batch of many new loaders: `python -m benchmarks.ours start --url URL --batch B`.

`python -m benchmarks.compare --kind starts` runs it against a bucket where 10% of the requests take 2 s longer.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser

from benchmarks.cells import STARTS
from stoker_torch import Loader


def start_seconds(url: str, batch: int, seed: int) -> float:
    """Return the time from constructing a loader to its first batch; both are dropped then."""
    started = time.perf_counter()
    with Loader(url, batch_size=batch, seed=seed) as loader:
        next(iter(loader))
        return time.perf_counter() - started


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.ours", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("start",))
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", help="name of the data, for logs")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--starts", type=int, default=STARTS)
    options = parser.parse_args()
    imports_cpu_seconds = time.process_time()
    start_seconds(options.url, options.batch, 0)  # imports what only a first start imports
    found = [start_seconds(options.url, options.batch, seed) for seed in range(options.starts)]
    print(json.dumps({"starts": found, "imports_cpu_seconds": imports_cpu_seconds}))
