"""An instance that answers several requests at a time: statuses, and raw objects that are packed together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stoker import open_store
from stoker.abc import ObjectInfo
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    DatasetExistsError,
    DeadlineError,
    EventError,
    FormatError,
    NotFoundError,
    PackError,
    SchemaError,
    ServerError,
    StokerError,
    StoreError,
    ThrottledError,
)
from stoker.testing import run_virtual
from stoker_functions._commit import commit
from stoker_functions._deployment import Deployment, InvocationDeadline
from stoker_functions._ingest import ingest_object
from stoker_functions._instance import answer_request
from support.cases import for_each
from support.deployments import DelayedStore, Place


def hosted(place: Place, **changes: Any) -> Deployment:
    return Deployment(
        place.deployment(**changes).settings,
        open_url=lambda url: open_store(place.raw if url.startswith("gs://") else url),
    )


def announced(info: ObjectInfo, **changes: Any) -> dict[str, Any]:
    """Return the notification of Google's storage for a new object."""
    data = {
        "kind": "storage#object",
        "bucket": "raw-of-a-test",
        "name": info.key,
        "size": str(info.size_bytes),
        "generation": info.tag,  # a decimal number, too, for the first nine objects of a store in memory
        "metageneration": "1",
        "contentType": "application/octet-stream",
    }
    return {**data, **changes}


async def post_event(instance: Deployment, event: dict[str, Any]) -> tuple[str, int]:
    """Return what an instance answers to such a notification: what is wrong, if anything, and the status."""
    answer, status = await answer_request(ingest_object, json.dumps(event).encode(), instance)
    return answer.get("errorType", ""), status


def test_the_answer_is_what_the_handler_returns() -> None:
    async def main() -> None:
        async def echo(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
            return {"event": event, "seconds": deadline.remaining_seconds()}

        found = await answer_request(echo, b'{"a": [1]}', hosted(Place(), timeout_seconds=300.0))
        assert found == ({"event": {"a": [1]}, "seconds": 300.0}, 200)

    run_virtual(main())


@for_each(
    ("error", "status"),
    [
        (EventError, 400),
        (ConfigError, 400),
        (SchemaError, 400),
        (FormatError, 400),
        (PackError, 400),
        (DatasetExistsError, 400),
        (ThrottledError, 429),
        (ServerError, 503),
        (ConnectionLostError, 503),
        (DeadlineError, 503),
        (NotFoundError, 500),
        (CredentialsError, 500),
        (StoreError, 500),
    ],
)
def test_an_error_is_named_and_its_status_says_whether_to_try_again(error: type[StokerError], status: int) -> None:
    async def main() -> None:
        async def fail(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
            raise error("what is wrong")

        found = await answer_request(fail, b"{}", hosted(Place()))
        assert found == ({"errorType": error.__name__, "errorMessage": "what is wrong"}, status)

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, "{}".encode("utf-16")[:3]])
def test_a_body_that_is_no_json_is_an_event_error(body: bytes) -> None:
    async def main() -> None:
        async def never(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
            raise AssertionError

        answer, status = await answer_request(never, body, hosted(Place()))
        assert (answer["errorType"], status) == ("EventError", 400)

    asyncio.run(main())


def test_a_mistake_of_ours_is_not_taken_for_one_of_the_caller() -> None:
    async def main() -> None:
        async def broken(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await answer_request(broken, b"{}", hosted(Place()))

    asyncio.run(main())


def test_objects_that_are_announced_within_a_second_are_one_run_and_a_bad_one_fails_alone() -> None:
    async def main() -> None:
        place = Place()
        instance = hosted(place, sources=("gs://raw-of-a-test",))
        events = [announced(info) for info in await place.put(range(9))]
        events[3]["bucket"] = "of-another"
        events[5]["size"] = "many"
        ends = await asyncio.gather(*(post_event(instance, event) for event in events))
        assert [end for end in enumerate(ends) if end[1] != ("", 200)] == [
            (3, ("EventError", 400)),
            (5, ("EventError", 400)),
        ]
        answer, status = await answer_request(commit, json.dumps({"dataset": place.dataset}).encode(), instance)
        assert (status, answer["runs"]) == (200, 1)
        assert await place.numbers() == [0, 1, 2, 4, 6, 7, 8]

    run_virtual(main())


def test_batches_are_packed_one_at_a_time_and_late_ones_fail_in_time() -> None:
    async def main() -> None:
        place = Place()
        instance = hosted(place, sources=("gs://raw-of-a-test",), timeout_seconds=20.0)
        busy: list[int] = []

        class Slow(DelayedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if key.endswith(".bin"):
                    busy.append(1)
                    await super().before(number, operation, key)
                    busy.append(-1)

        instance = Deployment(
            instance.settings,
            open_url=lambda url: Slow(open_store(place.raw if url.startswith("gs://") else url), 16.0),
        )
        requests = []
        start = asyncio.get_running_loop().time()
        for info in await place.put(range(4)):
            requests.append(asyncio.ensure_future(post_event(instance, announced(info))))
            await asyncio.sleep(2)
        ends = await asyncio.gather(*requests)
        assert [status for _, status in ends] == [200, 503, 503, 503]
        assert asyncio.get_running_loop().time() - start < 2 + 20
        assert busy[:2] == [1, -1]

    run_virtual(main())


def test_an_announcement_that_cannot_be_packed_in_time_fails() -> None:
    async def main() -> None:
        place = Place()
        instance = hosted(place, sources=("gs://raw-of-a-test",), timeout_seconds=2.0)
        instance = Deployment(
            instance.settings,
            open_url=lambda url: DelayedStore(open_store(place.raw if url.startswith("gs://") else url), 1.5),
        )
        (info,) = await place.put([1])
        assert await post_event(instance, announced(info)) == ("DeadlineError", 503)

    run_virtual(main())
