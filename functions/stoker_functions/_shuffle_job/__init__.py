"""Materialized epochs: the samples of one epoch of ``full``, written in its order as a small data set of their own."""
