"""The catalog in Redis, for many packers: records are in memory while runs are packed, in the bucket once committed.

The metadata server of DIESEL (Wang et al., ICPP 2020). Redis may lose all of its data or its newest writes: the first
record of each run is in the bucket, written before its first object, and the rest can be read from the heads of its
super-samples (:mod:`stoker._maintenance.inspection`). Runs that are in the bucket and not in Redis are restored when
the records are read; if Redis has another identity than at the last reading, as after a restart or a fail-over, all
unfinished runs are.

One hash per data set: ``stoker:{URL}:records``, run → record. A record only grows: a script compares the progress.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import FullJitterBackoff

from stoker._base.retry import RetryingStore
from stoker._base.task_group import for_each
from stoker._maintenance.inspection import restore_record
from stoker._pack.catalog import BucketCatalog
from stoker._pack.record import STATES, Journal, PackRecord
from stoker.errors import ChecksumError, ConnectionLostError, CredentialsError, FormatError, PackError, StoreError

_log = logging.getLogger("stoker_functions.catalog.redis")
_SAVE = """
local known = redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 and redis.call('HGET', KEYS[2], ARGV[1])
if known and tonumber(known) >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
_RETRIES = 4
_TIMEOUT_SECONDS = 5.0
_RESTORE_CONCURRENCY = 4


class RedisCatalog(BucketCatalog):
    """The pack records of one data set in Redis; see the module.

    Args:
        store: store of the data set.
        url: URL of the server, ``redis://host:port/0`` or ``rediss://…``, without a password.
        password: password of the server; default none.
    """

    def __init__(self, store: RetryingStore, url: str, *, password: str | None = None) -> None:
        super().__init__(store)
        self._redis: Redis = Redis.from_url(
            url,
            password=password,
            decode_responses=False,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(FullJitterBackoff(cap=1.0, base=0.05), _RETRIES),
            retry_on_error=[exceptions.ConnectionError, exceptions.TimeoutError],
        )
        self._url = url
        self._records_key = f"stoker:{{{store.url}}}:records"
        self._progress_key = f"stoker:{{{store.url}}}:progress"
        self._server_key = f"stoker:{{{store.url}}}:server"
        self._save = self._redis.register_script(_SAVE)

    async def journal(self, run: str) -> Journal:
        """Return the journal of a run: one command, and a GET if the run is not in Redis."""
        record = self._parse_record(run, await self._await_reply(self._redis.hget(self._records_key, run)))
        if record is not None:
            return _RedisJournal(self, None, record)
        first = await self.read_journal(run)
        return _RedisJournal(self, first.tag, first.recorded)

    async def records(self) -> list[PackRecord]:
        """Restore the records that Redis has lost, and return all, sorted by run."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._records_key)
            pipe.get(self._server_key)
            pipe.info("server")
            replies, server, info = await self._await_reply(pipe.execute())
        identity = str(info["run_id"]).encode()
        parsed = (self._parse_record(name.decode(), data) for name, data in replies.items())
        in_memory = {record.run: record for record in parsed if record is not None}
        in_bucket = {record.run: record for record in await super().records()}
        late = _stale_runs(in_memory, in_bucket)
        await self._remove(late)
        for run in late:
            del in_memory[run]
        restored_runs = await self._restore_records(
            _uncertain_records(in_memory, in_bucket, is_same_server=server == identity)
        )
        if server != identity:
            await self._await_reply(self._redis.set(self._server_key, identity))
        return _merge_records({**in_memory, **restored_runs}, in_bucket)

    async def save(self, records: Iterable[PackRecord]) -> None:
        """Record committed runs in the bucket, and delete them from Redis."""
        committed = list(records)
        await super().save(committed)
        await self._remove([record.run for record in committed])

    async def delete_records(self, runs: Iterable[str]) -> None:
        """Delete the records of runs, from the bucket first, since records in the bucket are restored to Redis."""
        names = list(runs)
        await super().delete_records(names)
        await self._remove(names)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def put(self, record: PackRecord) -> None:
        """Record a run in Redis, unless the record there has the same or more progress."""
        state, objects = record.progress
        progress = (state << 40) + objects
        arguments: list[Any] = [record.run, progress, record.to_bytes()]
        await self._await_reply(self._save(keys=[self._records_key, self._progress_key], args=arguments))

    async def _restore_records(self, records: Iterable[PackRecord]) -> dict[str, PackRecord]:
        restored: dict[str, PackRecord] = {}

        async def restore(record: PackRecord) -> None:
            try:
                restored[record.run] = await restore_record(self.store, record)
            except FormatError as error:  # the run stays unfinished, and the others can still be committed
                _log.warning("%s: cannot restore the record of run %s: %s", self.store.url, record.run, error)
                restored[record.run] = record
            if restored[record.run] is not record:
                await self.put(restored[record.run])

        await for_each(records, restore, concurrency=_RESTORE_CONCURRENCY)
        return restored

    def _parse_record(self, run: str, data: bytes | None) -> PackRecord | None:
        """Return the record of a run in Redis; None if there is none or it is damaged, which counts as lost."""
        try:
            return None if data is None else PackRecord.from_bytes(data)
        except (FormatError, ChecksumError) as error:
            _log.warning("%s: ignoring the record of run %s in Redis: %s", self.store.url, run, error)
            return None

    async def _remove(self, runs: list[str]) -> None:
        if runs:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hdel(self._records_key, *runs)
                pipe.hdel(self._progress_key, *runs)
                await self._await_reply(pipe.execute())

    async def _await_reply(self, answer: Any) -> Any:
        """Await a reply of the server and translate its errors; the client does not annotate the type of a reply."""
        try:
            return await answer
        except exceptions.AuthenticationError:
            raise CredentialsError(f"{self._url} rejects the password: correct STOKER_CATALOG_PASSWORD") from None
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise ConnectionLostError(f"{self._url}: {str(error)[:200]}") from error
        except exceptions.RedisError as error:
            raise StoreError(f"{self._url}: {str(error)[:200]}") from error


def _stale_runs(in_memory: Mapping[str, PackRecord], in_bucket: Mapping[str, PackRecord]) -> list[str]:
    """Return the runs whose record in Redis is stale: a repeated invocation wrote it after the end of the run.

    The bucket was listed later, so its records are newer.
    """
    return [run for run in in_memory if run not in in_bucket or in_bucket[run].is_committed]


def _uncertain_records(
    in_memory: Mapping[str, PackRecord], in_bucket: Mapping[str, PackRecord], *, is_same_server: bool
) -> list[PackRecord]:
    """Return the records that may lack progress: those that Redis lost; after a change of server, all."""
    lost = [record for run, record in in_bucket.items() if run not in in_memory]
    doubtful = lost if is_same_server else [*lost, *in_memory.values()]
    return [record for record in doubtful if record.state == "packing"]


def _merge_records(in_memory: Mapping[str, PackRecord], in_bucket: Mapping[str, PackRecord]) -> list[PackRecord]:
    """Return the record with more progress of each run, sorted by run; the one in Redis if both are equal."""
    merged = {**in_bucket, **in_memory}
    for run, record in in_bucket.items():
        if record.progress > merged[run].progress:
            merged[run] = record
    return [merged[run] for run in sorted(merged)]


class _RedisJournal(Journal):
    """The journal of one run: its first record is in the bucket, all later ones are in Redis."""

    def __init__(self, catalog: RedisCatalog, tag: str | None, recorded: PackRecord | None) -> None:
        super().__init__(catalog.store, tag, recorded)
        self._catalog = catalog

    async def save(self, record: PackRecord) -> None:
        """Record the run in Redis, and also in the bucket if it is not there yet.

        Raises:
            PackError: the record was deleted.
        """
        if self.recorded is None:
            await super().save(replace(record, state=STATES[0], prefix=None))
        elif self.recorded.progress >= record.progress:
            return
        elif record.state != STATES[0] and (await self._catalog.read_journal(record.run)).recorded is None:
            raise PackError(f"the record of run {record.run} was deleted while it was packed; pack it again")
        await self._catalog.put(record)
        self.recorded = record
