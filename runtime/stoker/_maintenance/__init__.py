"""Maintenance of a data set: verification, recovery of a lost manifest, compaction, garbage collection and removal."""
