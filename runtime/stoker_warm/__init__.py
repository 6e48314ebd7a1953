"""A tier in the memory of functions that are kept warm: super-samples as erasure-coded shards."""
