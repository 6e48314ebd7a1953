"""Caches of this machine, in memory and on disk, whose eviction policies know the order of the epoch."""
