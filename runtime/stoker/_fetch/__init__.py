"""The path from a store to batches: prefetch, verification, deadlines, retries, hedges, concurrency, gathering.

:mod:`~stoker._fetch.pipeline` delivers batches from one :mod:`~stoker._fetch.batch_stream` per uninterrupted range of
the order. :mod:`~stoker._fetch.prefetcher` keeps the ring filled ahead of it, :mod:`~stoker._fetch.super_samples` and
:mod:`~stoker._fetch.groups` fill one slot, :mod:`~stoker._fetch.fetcher` gets verified bytes for it, and
:mod:`~stoker._fetch.range_reader` reads one range with retries and hedges. The other modules contain the decisions of
these, and :mod:`~stoker._fetch.config` the settings.
"""
