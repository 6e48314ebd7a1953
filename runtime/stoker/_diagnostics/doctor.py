"""``stoker doctor``: checks this machine, a bucket and the data set in it, and reports findings with remedies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from stoker._base.checksum import crc32c
from stoker._base.machine import Machine, inspect_machine
from stoker._base.retry import RetryingReader, RetryPolicy
from stoker._base.sizes import format_bytes, format_count
from stoker._diagnostics.machine import (
    Finding,
    Level,
    MachineRegion,
    detect_region,
    machine_findings,
    package_findings,
)
from stoker._diagnostics.probe import Probe, ProbeLimits, probe
from stoker._format.manifest import Manifest
from stoker._format.versions import find_newest_manifest, read_manifest
from stoker._stores import StoreOptions, open_store
from stoker._stores.http_objects import EndpointInfo, HttpObjectStore
from stoker._stores.location import parse_url
from stoker.abc import ObjectRef, Store, Writable
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    ConnectionLostError,
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StokerError,
    TruncatedError,
)

_SKEW_WARNING_SECONDS, _SKEW_PROBLEM_SECONDS = 60.0, 900.0
"""Stores reject signatures when clocks differ by more than 15 minutes."""
_MIN_CREDENTIAL_SECONDS = 3600.0
_FAR_SECONDS = 0.15
_SLOW_BYTES_PER_SECOND = 20e6
_SMALL_SUPER_SAMPLE_BYTES, _MAX_SMALL_SUPER_SAMPLES = 768 << 10, 16
"""Below the size of super-samples that are packed with a limit of 1 MiB."""
_LATE_FRACTION, _MIN_LATE, _FAILING_FRACTION = 0.01, 2, 0.1
"""Late reads are a warning from this fraction and this count on, failed reads a problem from this fraction on."""
_VERIFIED_SUPER_SAMPLES = 3
"""Number of super-samples to read and compare with their checksums."""
_MIN_HELD_SUPER_SAMPLES = 10
"""Minimum number of super-samples that a loader holds: a window of eight, and two in flight."""
_PROBE = ProbeLimits(requests=200, size_bytes=128 << 20, seconds=20.0)
_ATTEMPTS = RetryPolicy(attempts=3, backoff_base_seconds=0.2, backoff_cap_seconds=2.0)

_VERIFY, _COMPACT, _PLAN = "stoker verify URL", "stoker compact URL", "stoker plan URL --gpu-rate N"

_REMEDIES: Mapping[type[StokerError], str] = {
    PermissionDeniedError: "grant s3:GetObject, or storage.objects.get, which reading needs",
    ConnectionLostError: "check for a proxy or a firewall in between",
}
"""Error class → advice in addition to the error's own message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What to check, and replaceable probes of this machine.

    Attributes:
        url: URL of the data set.
        options: options of the store, such as credentials and endpoint.
        write: whether to write and delete a small object.
        limits: limits of the measurement of latency and bandwidth.
        clock: returns the time in seconds since 1970.
        machine: returns the resources of this machine.
        whereabouts: returns the region of this machine.
    """

    url: str
    options: StoreOptions | None = None
    write: bool = False
    limits: ProbeLimits = _PROBE
    clock: Callable[[], float] = time.time
    machine: Callable[[], Machine] = inspect_machine
    whereabouts: Callable[[], MachineRegion] = field(default=detect_region)


async def diagnose(config: DoctorConfig, on_finding: Callable[[Finding], object]) -> None:
    """Run all checks, pass each finding to ``on_finding``, and skip those that an earlier problem makes impossible.

    Raises:
        ConfigError: the URL or the options are wrong.
    """
    for finding in package_findings(parse_url(config.url).scheme):
        on_finding(finding)
        if finding.level is Level.PROBLEM:
            return
    machine = config.machine()
    for finding in machine_findings(machine):
        on_finding(finding)
    store = open_store(config.url, options=config.options)
    try:
        await _Doctor(config, machine, store, on_finding).run()
    finally:
        await store.close()


class _Doctor:
    def __init__(self, config: DoctorConfig, machine: Machine, store: Store, tell: Callable[[Finding], object]) -> None:
        self._config, self._machine, self._store, self._on_finding = config, machine, store, tell
        self._reader = RetryingReader(store, _ATTEMPTS)
        self._manifest: Manifest | None = None

    async def run(self) -> None:
        """Check the endpoint, the credentials, the permissions, the data set and the speed, in this order."""
        if isinstance(self._store, HttpObjectStore):
            try:
                await self._check_endpoint(self._store)
                self._on_finding(await self._check_identity(self._store))
            except StokerError as error:
                self._on_finding(_problem("endpoint", error))
                return
        read = await self._check_read()
        self._on_finding(read)
        if read.level is not Level.PROBLEM or self._config.write:
            self._on_finding(await self._check_list())
        if self._config.write:
            await self._check_write()
        if self._manifest is not None:
            await self._check_dataset(self._manifest)
            await self._check_speed(self._manifest)

    async def _check_endpoint(self, store: HttpObjectStore[Any]) -> None:
        started = self._config.clock()
        endpoint = await store.describe_endpoint()
        self._on_finding(Finding("endpoint", Level.OK, f"{endpoint.address} answers"))
        if endpoint.date is not None:
            self._on_finding(_clock_finding(endpoint.date, (started + self._config.clock()) / 2))
        self._on_finding(_region_finding(endpoint, await asyncio.to_thread(self._config.whereabouts)))

    async def _check_identity(self, store: HttpObjectStore[Any]) -> Finding:
        identity = await store.describe_credentials()
        if identity.expires is None:
            return Finding("credentials", Level.OK, identity.kind)
        left = (identity.expires - datetime.fromtimestamp(self._config.clock(), UTC)).total_seconds()
        text = f"{identity.kind}, for {_format_span(left)}"
        if identity.is_renewed or left > _MIN_CREDENTIAL_SECONDS:
            return Finding("credentials", Level.OK, f"{text}, then renewed" if identity.is_renewed else text)
        advice = "for a longer run, use credentials that renew themselves (a role, a profile), or a longer-lived token"
        if left <= 0:  # by this clock; a later check shows whether the store accepts them
            text = f"{identity.kind}, which expired {_format_span(-left)} ago"
            advice = "get new credentials"
        return Finding("credentials", Level.WARNING, text, advice)

    async def _check_read(self) -> Finding:
        try:
            self._manifest = manifest = await read_manifest(self._reader)
            rows = sorted({*range(0, len(manifest), max(1, len(manifest) // _VERIFIED_SUPER_SAMPLES))})[
                :_VERIFIED_SUPER_SAMPLES
            ]
            tagged = [await self._is_whole(manifest.ref(row)) for row in rows]
        except (ChecksumError, TruncatedError) as error:
            advice = "a loader rejects it: find all damaged objects, and pack them again or restore them from a copy"
            return Finding("read", Level.PROBLEM, str(error), advice, _VERIFY)
        except StokerError as error:
            if not isinstance(error, NotFoundError) or isinstance(error, BucketNotFoundError):
                return _problem("read", error)
            return self._missing_dataset() if self._manifest is None else _missing_object(error)
        if not all(tagged):
            text = "super-samples have other ETags or generations than the manifest pins, but the right contents"
            advice = "nothing if the bucket is a copy: checksums identify the objects"
            return Finding("read", Level.WARNING, text, advice, _VERIFY)
        count_text = f"{len(rows)} of {format_count(len(manifest), 'super-sample')}"
        return Finding("read", Level.OK, f"the manifest, and {count_text} with the right checksums")

    async def _is_whole(self, ref: ObjectRef) -> bool:
        """Read an object and compare it with its checksum; return whether it has the tag that the manifest pins.

        Raises:
            ChecksumError: the object is not the one that was packed.
            TruncatedError: the object is shorter than the one that was packed.
            StoreError: the object cannot be read.
        """
        data = memoryview(bytearray(ref.size_bytes))
        info = await self._reader.get_range(ref.key, 0, len(data), into=data)
        if (checksum := crc32c(data)) != ref.crc32c:
            raise ChecksumError(
                f"{self._store.url}/{ref.key} is not what was packed: its crc32c is {checksum:08x}, the manifest says "
                f"{ref.crc32c:08x}"
            )
        return not ref.tag or info.tag == ref.tag

    def _missing_dataset(self) -> Finding:
        """Report that there is no data set; no problem for a check with ``write``, which often precedes a pack."""
        if self._config.write:
            return Finding("read", Level.NOTE, "there is no data set yet")
        if self._is_served:
            return Finding("read", Level.PROBLEM, "there is no data set", "check the URL, which must end with /v1/NAME")
        return Finding(
            "read", Level.PROBLEM, "there is no data set", "pack one, or check the URL", "stoker pack SOURCE URL"
        )

    @property
    def _is_served(self) -> bool:
        return self._config.url.startswith("stoker+")

    async def _check_list(self) -> Finding:
        listing = self._reader.list("manifests/")
        try:
            await anext(listing, None)
        except PermissionDeniedError:
            text = "not allowed: training never lists, but packing, gc and rebuild-manifest do"
            return Finding("list", Level.NOTE, text, "grant s3:ListBucket, or storage.objects.list, for packing")
        except StokerError as error:
            return _problem("list", error)
        finally:
            if isinstance(listing, AsyncGenerator):
                await listing.aclose()
        return Finding("list", Level.OK, "allowed")

    async def _check_write(self) -> None:
        """Write an object twice, each time on the condition that it does not exist, and delete it."""
        if not isinstance(self._store, Writable) or self._is_served:
            self._on_finding(
                Finding("write", Level.NOTE, "not checked: a data set that a function serves is read-only")
            )
            return
        key = f"doctor/{secrets.token_hex(8)}"
        try:
            await self._store.put(key, b"stoker doctor", if_absent=True)
            try:
                second = await self._check_conditional_write(key)
            finally:
                await self._store.delete(key)
        except StokerError as error:
            advice = "grant these credentials s3:PutObject and s3:DeleteObject, or storage.objects.create and delete"
            self._on_finding(_problem("write", error, advice))
            return
        self._on_finding(Finding("write", Level.OK, "a small object was written and deleted"))
        self._on_finding(second)

    async def _check_conditional_write(self, key: str) -> Finding:
        try:
            await self._store.put(key, b"stoker doctor", if_absent=True)
        except PreconditionFailedError:
            return Finding("conditional write", Level.OK, "honoured")
        text = "the store ignores If-None-Match: two packers at the same time may lose a version"
        return Finding(
            "conditional write",
            Level.PROBLEM,
            text,
            "use a store that honours it, or pack in one process at a time",
        )

    async def _check_dataset(self, manifest: Manifest) -> None:
        packed = f"{format_count(manifest.samples, 'sample')} in {format_count(len(manifest), 'super-sample')}"
        text = f"version {manifest.version}, {packed}, {format_bytes(manifest.size_bytes)}"
        self._on_finding(
            Finding("data set", Level.OK, text) if len(manifest) else Finding("data set", Level.WARNING, text)
        )
        with suppress(StokerError):  # credentials that may read one version need not be able to find others
            newest = await find_newest_manifest(self._reader)
            if newest is not None and newest.version > manifest.version:
                text = f"version {newest.version} is complete, but readers still open version {manifest.version}"
                advice = "a writer ended before it published the version; the next writer does"
                self._on_finding(Finding("newest version", Level.WARNING, text, advice, _COMPACT))
        for finding in _size_findings(manifest, self._machine):
            self._on_finding(finding)

    async def _check_speed(self, manifest: Manifest) -> None:
        if not len(manifest):
            return
        try:
            refs = [manifest.ref(row) for row in range(0, len(manifest), max(1, len(manifest) // 64))]
            probed = await probe(self._store, refs, self._config.limits)
        except StokerError as error:
            advice = _REMEDIES.get(type(error), "find out which objects cannot be read")
            is_lost = isinstance(error, NotFoundError)
            self._on_finding(_missing_object(error) if is_lost else _problem("speed", error, advice, _VERIFY))
            return
        took = f"with {format_count(probed.requests, 'request')}, {format_bytes(probed.read_bytes)}"
        for finding in (*_speed_findings(probed), Finding("measured", Level.OK, took), *_failure_findings(probed)):
            self._on_finding(finding)


def _failure_findings(probed: Probe) -> Iterator[Finding]:
    """Report failed requests: those above the bucket's request rate, and those with other errors."""
    requests, throttled = format_count(probed.requests, "request"), probed.throttled
    is_failing = probed.failed_part >= _FAILING_FRACTION
    if probed.failed > throttled or is_failing:
        asked_for_less = f", {throttled} of them with a request to send fewer (503, 429)" if throttled else ""
        text = f"{probed.failed} of {requests} failed with a transient error{asked_for_less}"
        advice = (
            "find the cause before training: each is retried, and billed"
            if is_failing
            else "run this check again later"
        )
        yield Finding("errors", Level.PROBLEM if is_failing else Level.WARNING, text, advice)
    if (probed.limit is not None or throttled) and not is_failing:
        rate = f"about {probed.limit.requests_per_second:,.3g} requests per second" if probed.limit else "few requests"
        consequence = (
            f"{throttled} of {requests} were refused (503 SlowDown, 429)" if throttled else "it delays the others"
        )
        advice = "pack larger super-samples (fewer requests), use a disk cache, or ask for a higher limit"
        yield Finding("throttling", Level.WARNING, f"the bucket answers {rate}; {consequence}", advice, _PLAN)


def _size_findings(manifest: Manifest, machine: Machine) -> Iterator[Finding]:
    """Report super-samples that are too small, or too large for this machine."""
    half_bytes = float(np.median(manifest.rows.size_bytes)) if len(manifest) else 0.0
    if len(manifest) > _MAX_SMALL_SUPER_SAMPLES and half_bytes < _SMALL_SUPER_SAMPLE_BYTES:
        text, advice = "half of them have at most", "merge them: a small object costs as much latency as a large one"
        yield Finding("super-sample size", Level.WARNING, f"{text} {format_bytes(half_bytes)}", advice, _COMPACT)
    needed_bytes = _MIN_HELD_SUPER_SAMPLES * manifest.largest_bytes + manifest.file_bytes
    if needed_bytes > machine.free_bytes:
        text = f"a window of 8 needs {format_bytes(needed_bytes)}, but {format_bytes(machine.free_bytes)} are free"
        advice = "use a smaller window, a larger machine, or smaller super-samples"
        yield Finding("super-sample size", Level.PROBLEM, text, advice, _PLAN)


def _speed_findings(probed: Probe) -> Iterator[Finding]:
    latency = (
        f"first byte {_format_duration(probed.median_seconds)}, at most {_format_duration(probed.slowest_seconds)}"
    )
    if probed.late:
        latency += f" ({probed.late} of {format_count(len(probed.first_byte_seconds), 'request')} late)"
    is_far = probed.median_seconds > _FAR_SECONDS
    if is_far or probed.late >= max(_MIN_LATE, _LATE_FRACTION * len(probed.first_byte_seconds)):
        advice = "give the loader more memory to fetch farther ahead; it also hedges late requests, which are billed"
        if is_far:
            advice = "train closer to the bucket, or use larger super-samples and more memory"
        yield Finding("latency", Level.WARNING, latency, advice, _PLAN)
    else:
        yield Finding("latency", Level.OK, latency)
    rate, alone = probed.observed_bytes_per_second, probed.observed_alone_bytes_per_second
    together = format_count(probed.connections, "connection")
    rates = f"{alone / 1e6:,.0f} MB/s alone, {rate / 1e6:,.0f} MB/s with {together}"
    if probed.is_rate_assumed:
        rates = "not measured: the objects are too small to tell"
    is_slow = rate < _SLOW_BYTES_PER_SECOND
    level = Level.NOTE if probed.is_rate_assumed else Level.WARNING if is_slow else Level.OK
    remedy = ("check what else uses the network, or use a disk cache", _PLAN) if is_slow else ()
    yield Finding("bandwidth", level, rates, *remedy)


def _clock_finding(date: datetime, now_seconds: float) -> Finding:
    """Compare the clocks; the bucket's time is truncated to a second, hence the half second."""
    skew = now_seconds - date.timestamp() - 0.5
    size = abs(skew)
    if size < _SKEW_WARNING_SECONDS:
        return Finding("clock", Level.OK, "right" if size < 2 else f"{size:.0f} s off")
    text = f"this machine's clock is {_format_span(size)} {'ahead of' if skew > 0 else 'behind'} the bucket's"
    level = Level.PROBLEM if size >= _SKEW_PROBLEM_SECONDS else Level.WARNING
    advice = "set the clock: stores reject signatures if it is 15 minutes off"
    return Finding("clock", level, text, advice, "timedatectl set-ntp true")


def _region_finding(endpoint: EndpointInfo, where: MachineRegion) -> Finding:
    bucket = endpoint.region or "unknown"
    if endpoint.region and endpoint.signing_region and endpoint.region != endpoint.signing_region:
        text = f"the bucket is in {bucket}, requests are made for {endpoint.signing_region}"
        return Finding(
            "region", Level.PROBLEM, text, "ask for the bucket in its own region", f"export AWS_REGION={bucket}"
        )
    if not where.region or not endpoint.region:
        return Finding("region", Level.OK, f"the bucket is in {bucket}, this machine's region is unknown")
    if where.region.startswith(bucket):  # "us" contains "us-east1"
        return Finding("region", Level.OK, f"{bucket}, like this machine")
    text = f"the bucket is in {bucket}, this machine in {where.region} ({where.source})"
    return Finding(
        "region", Level.WARNING, text, "train in the bucket's region, or copy the bucket: egress is billed, and slow"
    )


def _problem(check: str, error: StokerError, advice: str = "", command: str = "") -> Finding:
    advice = advice or next((remedy for kind, remedy in _REMEDIES.items() if isinstance(error, kind)), "")
    name = "credentials" if isinstance(error, CredentialsError) else check
    return Finding(name, Level.PROBLEM, str(error), advice, command)


def _missing_object(error: StokerError) -> Finding:
    """Report that an object of the manifest does not exist."""
    return Finding("read", Level.PROBLEM, str(error), "find all missing objects, and pack them again", _VERIFY)


def _format_duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _format_span(seconds: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return format_count(int(seconds // size), name)
    return format_count(max(0, int(seconds)), "second")
