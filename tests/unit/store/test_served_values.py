"""The served store reads ranges of several super-samples by one request, and finds out what the function can do."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from stoker import HttpOptions, Operation, ServedOptions, open_store
from stoker._base.batch_read import BatchLimits, BatchReadable, BatchRefusedError, ObjectRange
from stoker._format.manifest import Manifest, version_key
from stoker._format.versions import read_manifest
from stoker._stores.object_store import MeteredStore, ObjectStore, with_meter
from stoker._stores.served_values import MAX_RANGES
from stoker.abc import Store
from stoker.errors import (
    BucketNotFoundError,
    OutdatedFunctionWarning,
    PermissionDeniedError,
    StoreError,
    ThrottledError,
    TruncatedError,
    UnexpectedAnswerError,
)
from stoker_functions.serve import HttpError, Request, Response
from support.datasets import pack_numbers
from support.serving_host import Hosted, running_service
from support.stores import run_check

Spoil = Callable[[Request, int, Response], Response]


def keep(_request: Request, _before: int, response: Response) -> Response:
    return response


def only_values(change: Callable[[Response], Response]) -> Spoil:
    """Change the responses to requests for values."""
    return lambda request, _before, response: change(response) if request.path.endswith("/values") else response


def refuse(status: int, code: str, **headers: str) -> Spoil:
    return only_values(lambda _: HttpError(status, code, "because", headers=headers).response())


def meet(
    use: Callable[[ObjectStore, Manifest, Hosted], Awaitable[None]],
    spoil: Spoil = keep,
    *,
    transport: Any = "direct",
    **changes: Any,
) -> None:
    """Use the metered store of a data set of many super-samples."""
    with running_service({"ds": pack_numbers(60, super_sample_bytes=800)}, spoil=spoil, **changes) as hosted:
        options = ServedOptions(http=HttpOptions(transport=transport))
        opened = open_store(hosted.dataset("ds"), options=options)

        async def check(store: Store) -> None:
            metered = with_meter(store)
            await use(metered, await read_manifest(metered), hosted)

        run_check(opened, check)


def ranges_of(manifest: Manifest, count: int = 4) -> list[ObjectRange]:
    return [ObjectRange(manifest.key(row), 8 * row, 8 * row + 20) for row in reversed(range(count))]


async def read(store: ObjectStore, ranges: list[ObjectRange]) -> bytes:
    into = bytearray(sum(end - start for _, start, end in ranges))
    await store.get_ranges(ranges, into=memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
def test_ranges_of_several_objects_are_one_request(transport: Any) -> None:
    async def use(store: ObjectStore, manifest: Manifest, hosted: Hosted) -> None:
        assert isinstance(store, BatchReadable)
        assert store.batch_limits == BatchLimits(4_500_000, MAX_RANGES)
        begun: list[int] = []
        ranges = ranges_of(manifest)
        into = bytearray(80)
        before, read_bytes = len(hosted.requests), store.meter.snapshot().read_bytes
        await store.get_ranges(ranges, into=memoryview(into), begun=lambda: begun.append(into.count(0)))
        assert len(hosted.requests) == before + 1
        assert begun == [80], "called before anything is written"
        assert store.batch_limits == BatchLimits(1_000_000, MAX_RANGES), "which the answer says"
        reading = store.meter.snapshot()
        assert (reading.requests[Operation.GET], reading.read_bytes) == (before + 1, read_bytes + 80)
        wanted = [(await store.get(key))[0][start:end] for key, start, end in ranges]
        assert bytes(into) == b"".join(wanted)

    meet(use, transport=transport, answer_bytes=1_000_000)


@pytest.mark.parametrize(
    ("status", "code"), [(405, "method-not-allowed"), (400, "bad-body"), (404, ""), (405, ""), (413, "")]
)
def test_a_function_without_the_request_is_asked_once_and_the_user_warned_once(status: int, code: str) -> None:
    def change(_: Response) -> Response:
        return HttpError(status, code, "x").response() if code else Response(status=status, body=b"<html>")

    async def use(store: ObjectStore, manifest: Manifest, _: Hosted) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _attempt in range(2):  # the second one was sent at the same time
                with pytest.raises(BatchRefusedError):
                    await read(store, ranges_of(manifest))
                assert store.batch_limits is None
        ((kind, text),) = [(warning.category, str(warning.message)) for warning in caught]
        assert kind is OutdatedFunctionWarning
        assert "deploy the function of this version" in text
        assert with_meter(store).batch_limits is None, "views know it, too"

    meet(use, only_values(change))


@pytest.mark.parametrize(
    ("status", "code"), [(404, "not-found"), (404, "no-such-super-sample"), (412, "changed"), (416, "bad-range")]
)
def test_a_refusal_for_the_sake_of_a_range_lets_others_be_asked_for(status: int, code: str) -> None:
    async def use(store: ObjectStore, manifest: Manifest, _: Hosted) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(BatchRefusedError):
                await read(store, ranges_of(manifest))
        assert store.batch_limits is not None

    meet(use, refuse(status, code))


def test_a_refusal_for_size_tells_the_limit() -> None:
    async def use(store: ObjectStore, manifest: Manifest, _: Hosted) -> None:
        ranges = [ObjectRange(manifest.key(row), 0, 500) for row in range(3)]
        with pytest.raises(BatchRefusedError, match="too-large"):
            await read(store, ranges)
        assert store.batch_limits == BatchLimits(1400, MAX_RANGES)
        assert len(await read(store, ranges[:2])) == 1000

    meet(use, answer_bytes=1400)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "unavailable", ThrottledError),
        (500, "failed", StoreError),
        (403, "forbidden", PermissionDeniedError),
        (404, "no-such-dataset", BucketNotFoundError),
    ],
)
def test_other_refusals_are_errors_as_for_other_requests(status: int, code: str, kind: type[StoreError]) -> None:
    async def use(store: ObjectStore, manifest: Manifest, _: Hosted) -> None:
        with pytest.raises(kind) as caught:
            await read(store, ranges_of(manifest))
        assert not isinstance(caught.value, BatchRefusedError)
        assert store.batch_limits is not None

    meet(use, refuse(status, code))


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
@pytest.mark.parametrize(
    "change",
    [
        lambda response: replace(response, body=response.body[:-1]),
        lambda response: replace(response, body=response.body + b"x"),
        lambda response: replace(response, status=204, body=b""),
        lambda response: replace(response, status=206),
    ],
    ids=["short", "long", "empty", "partial"],
)
def test_an_answer_of_another_size_is_refused(change: Callable[[Response], Response], transport: Any) -> None:
    async def use(store: ObjectStore, manifest: Manifest, _: Hosted) -> None:
        with pytest.raises((UnexpectedAnswerError, TruncatedError)):
            await read(store, ranges_of(manifest))

    meet(use, only_values(change), transport=transport)


def test_a_redirect_of_a_post_is_not_followed() -> None:
    def redirect(response: Response) -> Response:
        return replace(response, status=307, headers={"Location": "http://127.0.0.1:1/elsewhere"})

    async def use(store: ObjectStore, manifest: Manifest, hosted: Hosted) -> None:
        before = len(hosted.requests)
        with pytest.raises(StoreError, match="307"):
            await read(store, ranges_of(manifest))
        assert len(hosted.requests) == before + 1

    meet(use, only_values(redirect))


def test_objects_of_no_common_version_are_refused_without_a_request() -> None:
    async def use(store: ObjectStore, manifest: Manifest, hosted: Hosted) -> None:
        await store.get(version_key(1))
        before = len(hosted.requests)
        with pytest.raises(BatchRefusedError):
            await read(store, [*ranges_of(manifest), ObjectRange("data/0123456789abcdef/00000000", 0, 1)])
        assert len(hosted.requests) == before

    meet(use)


def test_a_store_without_such_a_request_says_so() -> None:
    store = open_store("memory://no-batches/x")
    assert isinstance(store, ObjectStore)
    assert store.batch_limits is None
    assert MeteredStore(object_with_url()).batch_limits is None

    async def check(_: Store) -> None:
        with pytest.raises(PermissionDeniedError, match="get_ranges"):
            await store.get_ranges([ObjectRange("a", 0, 1)], into=memoryview(bytearray(1)))

    run_check(store, check)


def object_with_url() -> Any:
    class Plain:
        url = "plain://x"

    return Plain()


def test_a_plug_ins_batches_are_metered() -> None:
    class Plugin:
        url = "plugin://x"
        batch_limits = BatchLimits(10, 10)

        async def get_ranges(self, ranges: Any, *, into: memoryview, begun: Any = None) -> None:
            into[:] = b"0123"

    store = with_meter(Plugin())  # type: ignore[arg-type]
    assert store.batch_limits == (10, 10)

    async def check(_: Store) -> None:
        assert await read(store, [ObjectRange("a", 0, 4)]) == b"0123"

    run_check(store, check)
    assert store.meter.snapshot().read_bytes == 4
