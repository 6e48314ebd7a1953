"""From a store to batches: look-ahead, verification, deadline, retries, hedges, adaptive concurrency, gathering.

:mod:`~stoker._fetch.pipeline` gives batches, made by a :mod:`~stoker._fetch.batch_stream` for each uninterrupted
stretch of the order. :mod:`~stoker._fetch.prefetcher` keeps the ring filled ahead of it,
:mod:`~stoker._fetch.super_samples` and :mod:`~stoker._fetch.groups` fill one slot, :mod:`~stoker._fetch.fetcher` gets
verified bytes for it, and :mod:`~stoker._fetch.range_reader` one range, however many requests it takes. The rest are
the decisions these make, and :mod:`~stoker._fetch.config` what they are set to.
"""
