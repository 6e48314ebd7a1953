"""Concurrent calls of functions; :mod:`stoker.fanout` exports the public part."""
