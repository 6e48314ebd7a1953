"""Getting bytes from a store into memory: deadline, retries, hedges, adaptive concurrency, verification, look-ahead.

:mod:`~stoker.fetch.prefetcher` keeps the ring filled, :mod:`~stoker.fetch.fetcher` gets verified bytes for it, and
:mod:`~stoker.fetch.range_reader` one range, however many requests it takes; the rest are the decisions these make.
"""
