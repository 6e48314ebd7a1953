"""What everything stands on: clocks, threads, bounded work, records of events."""
