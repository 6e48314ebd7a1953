"""Materialized epochs: the samples of one epoch of shuffle ``full``, written in its order as a separate data set."""
