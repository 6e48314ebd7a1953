"""From a request to its response, whatever happens on the way; and the handlers that platforms call for it.

The data sets of a service keep their manifests while there is room, and what reads their samples.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, cast

from stoker._base.retry import RetryingStore, RetryPolicy
from stoker._base.threads import PerLoop
from stoker._fetch.config import FetchConfig
from stoker._fetch.samples import SampleReader
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._format.versions import read_manifest
from stoker._memory.budget import SampleMemory
from stoker._stores.access_token import TokenKeys
from stoker.abc import Store
from stoker.errors import (
    ConfigError,
    CredentialsError,
    DeadlineError,
    FetchError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    StokerError,
    TransientError,
)
from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_functions.serve._answers import (
    GOOGLE_ANSWER_BYTES,
    LAMBDA_ANSWER_BYTES,
    ServeConfig,
    answer_object,
    batch_id,
    caching,
    read_batch,
)
from stoker_functions.serve._messages import (
    AsgiApp,
    Ask,
    Refusal,
    Request,
    Response,
    from_asgi,
    from_lambda_url,
    is_unchanged,
    parse,
    to_asgi,
    to_lambda_url,
)

# Waiting is billed here: clients are told when to try again. Only a batch, of many reads, tries some of them again.
_ONCE = RetryPolicy(attempts=1)
_FETCHES = FetchConfig(deadline_seconds=20.0, attempts=6, attempt_seconds=8.0, hedge=False)


class Shelf:
    """One data set, on one event loop.

    Args:
        store: where it is.
        manifest_bytes: of manifests that may be kept; the one used last always is.

    Attributes:
        store: the same, without retries.
    """

    def __init__(self, store: Store, manifest_bytes: int) -> None:
        self.store = RetryingStore(store, _ONCE)
        self._manifest_bytes = manifest_bytes
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._newest = "", 0  # the pointer's tag, and the version that it stood for
        self._reading = asyncio.Lock()

    async def manifest(self, version: int | None) -> Manifest:
        """Return a version, or the one that is newest at the time of the call; of many that ask, one reads.

        Raises:
            NotFoundError: there is no such version, or no data set.
            StoreError: it could not be had.
        """
        tag = "" if version else await self._pointer_tag()
        if (known := self._known(version, tag)) is not None:
            return known
        async with self._reading:
            if (known := self._known(version, tag)) is not None:
                return known
            async with self.telling_what_is_missing():
                found = self._keep(await read_manifest(self.store, version))
            if version is None:
                self._newest = tag, found.version
            return found

    @asynccontextmanager
    async def telling_what_is_missing(self) -> AsyncIterator[None]:
        """Do what needs a version of the manifest that may not exist.

        Who may not list a bucket is denied what does not exist; who may read the pointer may read every version.

        Raises:
            NotFoundError: it does not exist.
        """
        try:
            yield
        except PermissionDeniedError:
            await self.store.head(POINTER_KEY)
            raise NotFoundError(f"{self.store.url} has no such version of the manifest") from None

    async def _pointer_tag(self) -> str:
        """Return the tag of the newest manifest, empty if a commit was cut off before it wrote the first one."""
        try:
            return (await self.store.head(POINTER_KEY)).tag
        except NotFoundError:
            return ""

    def _known(self, version: int | None, tag: str) -> Manifest | None:
        """Return a version that is kept; for None, the newest one, if the pointer has the tag still."""
        if version is None:
            version = self._newest[1] if tag and tag == self._newest[0] else 0
        found = self._manifests.get(version)
        if found is not None:
            self._manifests.move_to_end(version)
        return found

    def _keep(self, manifest: Manifest) -> Manifest:
        self._manifests[manifest.version] = manifest
        self._manifests.move_to_end(manifest.version)
        held_bytes = sum(kept.file_bytes for kept in self._manifests.values())
        while held_bytes > self._manifest_bytes and len(self._manifests) > 1:
            _, oldest = self._manifests.popitem(last=False)
            held_bytes -= oldest.file_bytes
        return manifest


class Library:
    """All data sets of a service, on one event loop.

    Args:
        datasets: name → URL.
        store: opens the store at a URL, or returns the one that is open.
        memory_bytes: a quarter for manifests, in equal parts for each data set, the rest to read samples with.
    """

    def __init__(self, datasets: Mapping[str, str], store: Callable[[str], Store], memory_bytes: int) -> None:
        self._datasets, self._store = datasets, store
        self._manifest_bytes = memory_bytes // (4 * max(1, len(datasets)))
        self._reading_bytes = memory_bytes - memory_bytes // 4
        self._shelves: dict[str, Shelf] = {}
        self._reader: tuple[str, int, SampleReader] | None = None
        self._lent = 0  # to how many, at this time
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._turn = asyncio.Lock()

    def shelf(self, name: str) -> Shelf:
        """Return a data set by its name.

        Raises:
            Refusal: there is none of that name.
        """
        if name not in self._datasets:
            raise Refusal(404, "no-such-dataset", "there is no data set of that name here")
        if name not in self._shelves:
            self._shelves[name] = Shelf(self._store(self._datasets[name]), self._manifest_bytes)
        return self._shelves[name]

    @asynccontextmanager
    async def reader(self, name: str, manifest: Manifest) -> AsyncIterator[SampleReader]:
        """Lend what reads samples of a version of a data set; it is kept with its heads until another is wanted.

        A reader may take all the memory, so there is one at a time, for any number of readings at once. Who wants
        another waits until it is free, and who comes later waits behind him.

        Raises:
            BudgetError: the memory is too small.
        """
        async with self._turn:
            if self._reader is None or self._reader[:2] != (name, manifest.version):
                await self._is_free.wait()
                self._reader = name, manifest.version, self._opened(name, manifest)
            reader = self._reader[2]
            self._lent += 1
            self._is_free.clear()
        try:
            yield reader
        finally:
            self._lent -= 1
            if not self._lent:
                self._is_free.set()

    def _opened(self, name: str, manifest: Manifest) -> SampleReader:
        memory = SampleMemory.plan(manifest, 0, self._reading_bytes)
        return SampleReader(self.shelf(name).store.wrapped, manifest, manifest.schema, memory, _FETCHES)


_log = logging.getLogger("stoker_functions.serve.service")
_BEARER = re.compile(r"[Bb]earer +([A-Za-z0-9._-]{1,10000})", re.ASCII)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="stoker"'}

_RESERVED_SECONDS = 1.0  # to tell the client that it should try again


class Service:
    """Answers requests for the data sets of a deployment. Made once per instance; nothing is read before the first.

    Args:
        config: what is served, and how much at a time.
        store: opens the store of a data set by its URL, or returns the one that is open; who gives it, closes it.
        clock: POSIX time, for tokens.

    Cancelling an answer leaves nothing behind.
    """

    def __init__(
        self, config: ServeConfig, store: Callable[[str], Store], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config, self._clock = config, clock
        self._library = PerLoop(lambda: Library(config.datasets, store, config.memory_bytes))

    async def answer(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request of somebody whom the platform has let in.

        Args:
            request: what is asked.
            seconds: that there are left for it.
        """
        return await self._answered(request, seconds, token_is_needed=False)

    async def answer_with_token(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request, which must carry a token of ours for the data set."""
        return await self._answered(request, seconds, token_is_needed=True)

    async def _answered(self, request: Request, seconds: float, *, token_is_needed: bool) -> Response:
        """Turn what goes wrong into a response; what nobody foresaw is left to the platform."""
        seconds = min(seconds, self._config.answer_seconds)
        try:
            allowed = self._datasets_of(request) if token_is_needed else None
            ask = parse(request)
            if allowed is not None and ask.dataset not in allowed:
                raise Refusal(403, "forbidden", "the token is not for this data set")
            async with asyncio.timeout(seconds):
                return await self._perform(ask, request)
        except StokerError as error:
            refusal = _refusal_of(error)
        except TimeoutError:
            refusal = _refusal_of(DeadlineError(f"no answer to {request.path!r} within {seconds:g} s"))
        return refusal.response(with_body=request.method != "HEAD")

    def _datasets_of(self, request: Request) -> tuple[str, ...]:
        """Return what a request's token is for."""
        if self._config.token_keys is None:
            raise ConfigError("requests with a token are served, and STOKER_TOKEN_KEYS is not set")
        match = _BEARER.fullmatch(request.headers.get("authorization", ""))
        try:
            return self._config.token_keys.verify(match[1] if match else "", self._clock()).datasets
        except CredentialsError:
            raise Refusal(401, "unauthorized", "a valid token is needed", headers=_CHALLENGE) from None

    async def _perform(self, ask: Ask, request: Request) -> Response:
        library = self._library.get()
        shelf, version = library.shelf(ask.dataset), ask.version
        headers = caching(pinned=version is not None)
        if ask.what == "manifest":
            key = POINTER_KEY if version is None else version_key(version)
            async with shelf.telling_what_is_missing():
                return await answer_object(shelf.store, request, self._config, key, headers)
        manifest = await shelf.manifest(version)
        headers |= {"Stoker-Version": str(manifest.version)}
        if ask.what == "super-samples":
            if ask.number >= len(manifest):
                raise Refusal(404, "no-such-super-sample", f"there are super-samples 0 to {len(manifest) - 1}")
            pinned = manifest.ref(ask.number)
            return await answer_object(shelf.store, request, self._config, pinned.key, headers, pinned)
        if ask.number >= manifest.samples:
            raise Refusal(404, "no-such-position", f"an epoch has positions 0 to {manifest.samples - 1}")
        etag = f'"{batch_id(manifest, ask)}"'
        headers |= {"ETag": etag, "Accept-Ranges": "none"}
        if is_unchanged(request.headers, etag):
            return Response(status=304, headers=headers)
        async with library.reader(ask.dataset, manifest) as reader:
            body = await read_batch(manifest, reader, ask, self._config.answer_bytes)
        headers["Content-Type"] = "application/octet-stream"
        if request.method == "HEAD":
            return Response(status=200, headers={**headers, "Content-Length": str(len(body))})
        return Response(status=200, headers=headers, body=body)


def _refusal_of(error: StokerError) -> Refusal:
    """Return what a client is told of an error: what it can do, and nothing of what lies behind the service."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, NotFoundError):
        return Refusal(404, "not-found", "the data set has no such version or object")
    if isinstance(error, TransientError | FetchError | ObjectChangedError):
        _log.warning("a request was put off: %s", error)
        wanted_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        headers = {"Retry-After": str(min(60, max(1, math.ceil(wanted_seconds or 0))))}
        return Refusal(503, "unavailable", "the bucket does not answer as it should; try again", headers=headers)
    _log.error("a request failed: %s: %s", type(error).__name__, error)
    return Refusal(500, "failed", "the request could not be answered; the function's log says why")


async def serve_url(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that the platform has let through.

    Raises:
        EventError: the event is no request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer, event, deadline)


async def serve_url_with_token(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that anybody may call, if it has a token of ours.

    Raises:
        EventError: the event is no request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer_with_token, event, deadline)


async def _serve_url(
    answer: Callable[[Request, float], Awaitable[Response]], event: object, deadline: Deadline
) -> dict[str, Any]:
    request = from_lambda_url(cast("Mapping[str, Any]", event))
    return to_lambda_url(await answer(request, deadline.remaining_seconds() - _RESERVED_SECONDS))


async def serve_scope(scope: MutableMapping[str, Any], deployment: Deployment) -> AsgiApp:
    """Answer an ASGI request that the platform has let through."""
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer(from_asgi(scope)))


async def serve_scope_with_token(scope: MutableMapping[str, Any], deployment: Deployment) -> AsgiApp:
    """Answer an ASGI request from anybody, if it has a token of ours."""
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer_with_token(from_asgi(scope)))


def config_of(settings: Settings, answer_bytes: int) -> ServeConfig:
    """Return the configuration of a deployment on a platform that sends at most ``answer_bytes``.

    Raises:
        ConfigError: ``STOKER_TOKEN_KEYS`` or ``STOKER_DATASETS`` is not valid.
    """
    return ServeConfig(
        datasets=settings.datasets,
        token_keys=TokenKeys.parse(settings.token_keys) if settings.token_keys else None,
        answer_bytes=answer_bytes,
        memory_bytes=settings.memory_bytes // 4,
    )


@cache
def _service(deployment: Deployment, answer_bytes: int) -> Service:
    """Return the service of a deployment, of which an instance has one."""
    return Service(config_of(deployment.settings, answer_bytes), deployment.served)
