"""The job's own processes as a cache: one process on each machine keeps super-samples for all ranks there."""
