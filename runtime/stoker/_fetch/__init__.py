"""Getting bytes from a store into memory: deadline, retries, hedges, adaptive concurrency, verification, look-ahead.

:mod:`~stoker._fetch.prefetcher` keeps the ring filled, :mod:`~stoker._fetch.fetcher` gets verified bytes for it, and
:mod:`~stoker._fetch.range_reader` one range, however many requests it takes; the rest are the decisions these make.
"""
