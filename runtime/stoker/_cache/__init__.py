"""Caches that know the order: what to keep of what was fetched, in memory or on a disk."""
