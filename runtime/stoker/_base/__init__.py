"""The lowest layer: clocks, threads, concurrency limits, retries, arguments, and records of events."""
