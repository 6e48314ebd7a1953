"""Planning ahead: the simulator, which runs the fetcher itself against modelled buckets and machines."""
