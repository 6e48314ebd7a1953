"""Decides, before anything is packed, whether a pack starts a new run or resumes an unfinished one."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from stoker._base.retry import PACK_RETRY_POLICY, RetryingReader, RetryPolicy
from stoker._base.sizes import format_bytes, format_count
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._format.pack_shuffle import PackShuffle
from stoker._format.schema import Column, Schema
from stoker._format.supersample import FORMAT, MAX_SAMPLE_BYTES
from stoker._pack.record import Journal, PackRecord, list_records, record_key, run_id, run_prefix
from stoker._pack.stored_samples import HEADER_BYTES, TaskMemory
from stoker.abc import Readable, Store
from stoker.errors import ConfigError, DatasetExistsError, NotFoundError, PackError, SchemaError

_log = logging.getLogger("stoker.pack.plan")
_MAX_SHOWN_ITEMS = 5
_MAX_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """Configuration of a pack.

    Attributes:
        schema: columns of every sample.
        mode: ``create`` a new data set, ``append`` to an existing one, or ``overwrite`` any existing one: the committed
            version then has the new samples alone, with any schema. Earlier versions stay readable until
            ``stoker gc --keep-versions`` deletes them.
        super_sample_bytes: maximum size of the data of a super-sample with several samples, in bytes, at most a quarter
            of ``memory_bytes``; a header of a few hundred bytes is added. A larger sample, up to 1 GiB, has a
            super-sample of its own.
        source: name of the samples, such as a fingerprint of their files. The next pack with the same source, schema
            and size resumes an unfinished one. By default a pack that creates is named by the URL, and one that
            appends or overwrites has no name: it is never resumed and shares no objects with another.
        concurrency: maximum number of concurrent uploads.
        retry: retry policy of every request.
        single_writer: whether nothing else writes to the data set meanwhile. A store without conditional writes needs
            this; the store's conditional writes are then not checked.
        shuffle: seed of a uniform permutation of all samples of the pack, 0 to 2**64 - 1; None (default) keeps the
            order of the source.
        memory_bytes: memory of the pack, in bytes; default 1 GiB. Permuting may use all of it, and super-samples in
            upload a quarter: a larger sample is uploaded alone, in parts. The result does not depend on it.

    Raises:
        ConfigError: a value is out of range.
        MemoryBudgetError: the memory is too small to permute; the message has the figure that fits.
    """

    schema: Schema
    mode: Literal["create", "append", "overwrite"] = "create"
    super_sample_bytes: int = 8 << 20
    source: str | None = None
    concurrency: int = 8
    retry: RetryPolicy = PACK_RETRY_POLICY
    single_writer: bool = False
    shuffle: int | None = None
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.mode not in ("create", "append", "overwrite"):
            raise ConfigError(f"mode must be 'create', 'append' or 'overwrite', not {self.mode!r}")
        if not _is_integer(self.memory_bytes) or self.memory_bytes < 4:
            raise ConfigError(f"memory_bytes must be an integer of at least 4, not {self.memory_bytes!r}")
        if not _is_integer(self.concurrency) or self.concurrency < 1:
            raise ConfigError(f"concurrency must be an integer of at least 1, not {self.concurrency!r}")
        self._check_size()
        if self.shuffle is None:
            return
        if not _is_integer(self.shuffle) or not 0 <= self.shuffle < 1 << 64:
            raise ConfigError(f"shuffle must be a seed, an integer from 0 to 2**64 - 1, not {self.shuffle!r}")
        self.plan_memory(self.super_sample_bytes + HEADER_BYTES)

    def _check_size(self) -> None:
        most = MAX_SAMPLE_BYTES if self.shuffle is not None else min(MAX_SAMPLE_BYTES, self.memory_bytes // 4)
        if not _is_integer(self.super_sample_bytes) or not 1 <= self.super_sample_bytes <= most:
            raise ConfigError(
                f"super_sample_bytes must be an integer from 1 to {most} ({format_bytes(most)}), a quarter of the "
                f"pack's memory and at most 1 GiB, not {self.super_sample_bytes!r}; raise memory to allow more (a "
                "larger sample has a super-sample of its own in any case)"
            )

    @property
    def upload_bytes(self) -> int:
        """Maximum size of the super-samples in upload, in bytes; a larger one is uploaded alone."""
        return self.memory_bytes // 4

    def plan_memory(self, largest_bytes: int) -> TaskMemory:
        """Return the memory of permuting super-samples of up to ``largest_bytes``.

        Raises:
            MemoryBudgetError: the memory is too small.
        """
        return TaskMemory.plan(self.memory_bytes, largest_bytes=largest_bytes, object_bytes=self.super_sample_bytes)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """The run that a pack starts or resumes.

    Attributes:
        dataset: id of the data set.
        record: record of the run, with its durable prefix.
        journal: journal of the run; has a record already if the run is resumed.
        is_in_manifest: whether an earlier process committed the run and died before it updated the record.
    """

    dataset: str
    record: PackRecord
    journal: Journal
    is_in_manifest: bool


async def plan_pack(store: Store, config: PackConfig) -> PackPlan:
    """Return the run that a pack of ``config`` to ``store`` starts or resumes.

    Raises:
        DatasetExistsError: the mode is ``create`` and the data set exists.
        NotFoundError: the mode is ``append`` and there is no data set.
        SchemaError: the mode is ``append`` and the data set has another schema.
        PackError: the state of the store does not allow the pack; the message says what to do.
    """
    base = await versions.find_newest_manifest(store)
    if config.mode == "append":
        check_can_append(store, config.schema, base)
    identity = _hash_pack(store, config, base if config.mode == "append" else None)
    creates = config.mode == "create" or base is None
    logged = await list_records(store, "" if creates else run_prefix(identity))
    records = [(item.record, item.tag) for item in logged if item.record is not None]
    for record, tag in records:
        if record.identity == identity and not record.is_committed:
            return await _plan_resumed_run(store, record, tag, base)
    if creates:
        check_can_create(store, base, [record for record, _ in records])
    tags = {item.key: item.tag for item in logged}
    return _plan_new_run(store, config, identity, base, tags)


def _plan_new_run(
    store: Store, config: PackConfig, identity: str, base: Manifest | None, tags: Mapping[str, str]
) -> PackPlan:
    """Return the plan of a new run on top of ``base``; ``tags`` maps the key of each existing record to its tag."""
    run = run_id(identity, 0 if base is None else base.version)
    source = config.source if config.source is not None else store.url
    return PackPlan(
        dataset=run if base is None else base.dataset,
        record=PackRecord(
            run=run,
            identity=identity,
            source=source,
            mode=config.mode,
            shuffle=None if config.shuffle is None else PackShuffle(config.shuffle, run),
        ),
        journal=Journal(store, tags.get(record_key(run)), None),
        is_in_manifest=False,
    )


def build_next_version(plan: PackPlan, packed: Manifest, base: Manifest | None, url: str) -> Manifest:
    """Return the version that adds the plan's run to ``base``, for :func:`stoker._format.versions.commit`.

    Args:
        plan: plan of the pack.
        packed: manifest of the pack's own super-samples.
        base: newest version, None if there is none.
        url: URL of the store, for messages.

    Raises:
        DatasetExistsError: the run was to create the data set, and another process created it first.
        PackError: another process committed the same run, or the data set was deleted or overwritten with other
            columns.
    """
    record = plan.record
    if base is not None and any(run.run == record.run for run in base.runs):
        if plan.is_in_manifest:
            return base
        kind = DatasetExistsError if record.mode == "create" else PackError
        raise kind(f"another process packed the same source to {url} at the same time; nothing was committed twice")
    if record.mode == "overwrite":
        return packed if base is None else replace(packed, version=base.version + 1)
    if record.mode == "create":
        if base is not None:
            raise DatasetExistsError(
                f"another process created a data set at {url} first; add to it with mode='append' "
                "(stoker pack --append)"
            )
        return packed
    if base is None or base.dataset != plan.dataset:
        raise PackError(f"the data set at {url} was deleted while samples were packed to append to it")
    if base.schema != packed.schema:
        raise PackError(f"the data set at {url} was overwritten with other columns while samples were packed to append")
    return base.append_runs(packed.rows, *packed.runs, shuffles=packed.shuffles)


def _hash_pack(store: Readable, config: PackConfig, base: Manifest | None) -> str:
    """Return the hash that identifies a pack: equal for the same samples, mode, schema and size, else different."""
    if config.source is not None:
        source = ["source", config.source]
    else:
        source = ["url", store.url] if config.mode == "create" else ["nameless", secrets.token_hex(16)]
    dataset = None if base is None else base.dataset
    content = [FORMAT, config.mode, dataset, config.schema.to_json(), config.super_sample_bytes, source]
    if config.shuffle is not None:
        content.append(["shuffle", str(config.shuffle)])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_can_append(store: Readable, schema: Schema, base: Manifest | None) -> Manifest:
    """Return ``base``, the newest version, if samples of ``schema`` can be added to it.

    Raises:
        NotFoundError: there is no data set.
        SchemaError: the data set has other columns.
    """
    if base is None:
        raise NotFoundError(
            f"there is no data set at {store.url} to append to; use mode='create' (stoker pack without --append)"
        )
    if base.schema != schema:
        raise SchemaError(
            f"the samples do not have the columns of the data set at {store.url}: they have "
            f"{describe_schema_difference(base.schema, schema)}; "
            "append samples with the data set's own columns, in their order"
        )
    return base


def check_can_create(store: Readable, base: Manifest | None, records: list[PackRecord]) -> None:
    """Check that a data set can be created where earlier packs left ``records``; log the unfinished ones.

    Raises:
        DatasetExistsError: there is a data set, or there was one that has lost its manifest.
    """
    if base is not None:
        raise _exists_error(store, base)
    if any(record.is_committed for record in records):
        raise DatasetExistsError(
            f"the data set at {store.url} has lost its manifest; restore it with: stoker rebuild-manifest {store.url}"
        )
    for record in records:
        _log.warning(
            "%s has %s of an unfinished pack with another source, size or schema (%.80s); "
            "resume it, or delete it with: stoker gc --abandoned %s --delete %s",
            store.url,
            format_count(len(record), "super-sample"),
            record.source,
            record.run,
            store.url,
        )


def _exists_error(store: Readable, base: Manifest) -> DatasetExistsError:
    return DatasetExistsError(
        f"there is a data set at {store.url} already (version {base.version}, {format_count(base.samples, 'sample')}); "
        "add to it with mode='append' (stoker pack --append), replace it with mode='overwrite' (stoker pack "
        "--overwrite), or use another URL"
    )


async def _plan_resumed_run(store: Store, record: PackRecord, tag: str, base: Manifest | None) -> PackPlan:
    dataset = record.run if base is None else base.dataset
    is_in_manifest = base is not None and any(run.run == record.run for run in base.runs)
    if is_in_manifest and record.state == "packing":
        raise PackError(
            f"an unfinished pack of this source ({format_count(len(record), 'super-sample')}) was adopted into "
            f"the data set at {store.url} by rebuild-manifest; pack the missing samples under another name with source="
        )
    if base is not None and record.mode == "create" and not is_in_manifest:
        raise _exists_error(store, base)
    record = await drop_lost_prefix(store, record, dataset)
    journal = Journal(store, tag, record)
    return PackPlan(dataset=dataset, record=record, journal=journal, is_in_manifest=is_in_manifest)


async def drop_lost_prefix(store: Readable, record: PackRecord, dataset: str) -> PackRecord:
    """Return the record of an unfinished run, without its prefix if objects of the prefix are missing in the store."""
    if record.prefix is None or await _is_prefix_stored(store, record.prefix, dataset):
        return record
    _log.warning(
        "%s has lost objects of the unfinished pack %s; packing again from the first sample", store.url, record.run
    )
    return replace(record, state="packing", prefix=None)


async def _is_prefix_stored(store: Readable, prefix: Manifest, dataset: str) -> bool:
    """Return whether every object of a record's prefix is in the store with its recorded size and tag."""
    run = prefix.runs[0].run
    stored = {info.key: info async for info in RetryingReader(store).list(f"data/{run}/")}
    stored_objects = (stored.get(prefix.key(row)) for row in range(len(prefix)))
    return prefix.dataset == dataset and all(
        info is not None and (info.size_bytes, info.tag) == (prefix.rows.size_bytes[row], prefix.rows.tag(row))
        for row, info in enumerate(stored_objects)
    )


def describe_schema_difference(expected: Schema, given: Schema) -> str:
    """Return, in one line, how the schema ``given`` differs from the data set's schema; empty if it does not."""
    return _join_names(_iter_differences(expected, given))


def _iter_differences(expected: Schema, given: Schema) -> Iterator[str]:
    yield from (f"no column {name!r}" for name in expected if name not in given)
    yield from (f"an unknown column {name!r}" for name in given if name not in expected)
    for name in expected:
        if name in given and expected[name] != given[name]:
            yield f"column {name!r} {_describe_column_difference(expected[name], given[name])}"
    if expected.keys() == given.keys() and list(expected) != list(given):
        yield f"the columns in the order {_join_names(given)}, not {_join_names(expected)}"


def _describe_column_difference(expected: Column, given: Column) -> str:
    theirs, ours = expected.to_json(), given.to_json()
    their_classes, our_classes = theirs.pop("classes", None), ours.pop("classes", None)
    if theirs != ours:
        return f"as {_describe_column(given)}, not {_describe_column(expected)}"
    if their_classes is None or our_classes is None:
        return f"{'without' if our_classes is None else 'with'} names of its classes"
    pairs = enumerate(zip_longest(our_classes, their_classes))
    number, (our_name, their_name) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return (
        f"with {len(our_classes):,} classes, not {len(their_classes):,}; the first that differs is number {number}: "
        f"{_format_class(our_name)}, not {_format_class(their_name)}"
    )


def _describe_column(column: Column) -> str:
    words = column.to_json()
    return " ".join([words["kind"], *(str(words[key]) for key in ("dtype", "shape") if key in words)])


def _format_class(name: str | None) -> str:
    return "none" if name is None else repr(name[:_MAX_SHOWN_CHARACTERS])


def _join_names(items: Iterable[str]) -> str:
    every = list(items)
    more = f" and {len(every) - _MAX_SHOWN_ITEMS:,} more" if len(every) > _MAX_SHOWN_ITEMS else ""
    return ", ".join(every[:_MAX_SHOWN_ITEMS]) + more
