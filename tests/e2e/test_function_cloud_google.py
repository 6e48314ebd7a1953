from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from stoker_local import LocalGcs
from stoker_local.functions import (
    FunctionCloud,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    GoogleSpec,
    ObjectFinalized,
    QueueSpec,
)
from stoker_local.functions._google import reserve_port
from support.function_cloud import GOOGLE_CODE, cloud_of, is_running
from support.waiting import until


def google(target: str, **changes: Any) -> GoogleSpec:
    return GoogleSpec(**{"name": target, "source": GOOGLE_CODE, "target": target, **changes})


@asynccontextmanager
async def page_of(url: str, method: str = "GET", **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession() as session, session.request(method, URL(url, encoded=True), **options) as answer:
        yield answer


async def get(cloud: FunctionCloud, target: str) -> int:
    async with page_of(cloud.google_urls["sleep"] + target) as answer:
        return answer.status


def test_a_request_reaches_the_real_framework_and_nothing_is_left_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        mirror = google("mirror", environment={"MINE": "1"})
        async with cloud_of(google=(mirror,)) as cloud:
            url = f"{cloud.google_urls['mirror']}/v1/a%20b/c%2Fd?x=1&y=%C3%BC"
            async with page_of(url, "POST", data=b"body", headers={"X-Mine": "2"}) as answer:
                assert answer.status == 200
                seen = await answer.json()
            assert (seen["method"], seen["path"], seen["query"]) == ("POST", "/v1/a%20b/c%2Fd", "x=1&y=%C3%BC")
            assert (seen["body"], seen["headers"]["x-mine"]) == ("body", "2")
            assert seen["environment"]["K_SERVICE"] == "mirror"
            assert seen["environment"]["MINE"] == "1"
            assert "SECRET_OF_THIS_TEST" not in seen["environment"]
            async with page_of(cloud.google_urls["mirror"]) as again:
                assert (await again.json())["pid"] == seen["pid"]
            figures = cloud.statistics()["mirror"]
            assert (figures.invocations, figures.cold_starts, figures.busy, figures.errors) == (2, 1, 0, 0)
            assert figures.dollars > 0
            pid: int = seen["pid"]
            return pid

    monkeypatch.setenv("SECRET_OF_THIS_TEST", "hush")
    assert not is_running(asyncio.run(scenario()))


def test_all_functions_are_at_one_address_below_their_names() -> None:
    async def scenario() -> None:
        async with cloud_of(google=(google("mirror"), google("mirror", name="other", token="hush"))) as cloud:
            for target, path, query in (
                ("/mirror", "/", ""),
                ("/mirror?x=1", "/", "x=1"),
                ("/mirror//a%20b/mirror?x=%2F", "//a%20b/mirror", "x=%2F"),
            ):
                async with page_of(cloud.google_url + target) as answer:
                    seen = await answer.json()
                assert (seen["path"], seen["query"]) == (path, query)
                assert seen["environment"]["K_SERVICE"] == "mirror"
            for target, status in (("/other/x", 401), ("/mirrors", 404), ("/", 404), ("/%6Dirror/x", 404)):
                async with page_of(cloud.google_url + target) as answer:
                    assert answer.status == status

    asyncio.run(scenario())


def test_instances_are_added_up_to_the_limit_then_calls_are_throttled() -> None:
    async def scenario() -> None:
        async with cloud_of(google=(google("sleep", instances=2, concurrency=2),)) as cloud:
            statuses = await asyncio.gather(*(get(cloud, "/?seconds=0.5") for _ in range(5)))
            assert sorted(statuses) == [200, 200, 200, 200, 429]
            figures = cloud.statistics()["sleep"]
            assert (figures.peak_instances, figures.throttles) == (2, 1)

    asyncio.run(scenario())


def test_a_token_is_requested_where_there_is_one_and_errors_pass_through() -> None:
    async def scenario() -> None:
        async with cloud_of(google=(google("error", token="sesame"),)) as cloud:
            url = cloud.google_urls["error"]
            async with page_of(url) as answer:
                assert answer.status == 401
            async with page_of(url, headers={"Authorization": "Bearer sesame"}) as answer:
                assert (answer.status, await answer.json()) == (400, {"errorType": "EventError"})
            assert cloud.statistics()["error"].invocations == 1

    asyncio.run(scenario())


def test_requests_and_responses_have_their_limits() -> None:
    async def scenario() -> None:
        async with cloud_of(google=(google("large", memory_mb=1024),)) as cloud:
            url = cloud.google_urls["large"]
            async with page_of(f"{url}/?bytes={32 << 20}") as answer:
                assert (answer.status, len(await answer.read())) == (200, 32 << 20)
            async with page_of(f"{url}/?bytes={(32 << 20) + 1}") as answer:
                assert answer.status == 500
            async with page_of(f"{url}/?bytes=1", "POST", data=BytesIO(bytes((32 << 20) + 1))) as answer:
                assert answer.status == 413

    asyncio.run(scenario())


def test_a_long_header_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "headed.py").write_text(
        "from functions_framework.aio import Response, http\n"
        "@http\n"
        "async def headed(request):\n"
        "    return Response(headers={'X-Long': 'x' * 20_000})\n"
    )

    async def scenario() -> None:
        async with cloud_of(google=(google("headed", source=str(tmp_path / "headed.py")),)) as cloud:
            url = cloud.google_urls["headed"]
            async with aiohttp.ClientSession(max_field_size=1 << 16) as session, session.get(url) as answer:
                assert (answer.status, len(answer.headers["X-Long"])) == (200, 20_000)

    asyncio.run(scenario())


def test_memory_beyond_the_limit_is_an_error_and_the_end_of_the_instance() -> None:
    async def scenario() -> None:
        async with cloud_of(google=(google("allocate", memory_mb=256),)) as cloud:

            async def allocate(mebibytes: int) -> tuple[int, str]:
                async with page_of(f"{cloud.google_urls['allocate']}/?mebibytes={mebibytes}") as answer:
                    return answer.status, await answer.text()

            status, pid = await allocate(8)
            assert status == 200
            status, text = await allocate(256)
            assert (status, text.startswith("Memory limit of 256 MiB exceeded with ")) == (503, True)
            await until(lambda: not is_running(int(pid)))
            assert (await allocate(8))[0] == 200
            assert cloud.statistics()["allocate"].cold_starts == 2

    asyncio.run(scenario())


def test_a_port_reserved_for_an_instance_is_not_given_to_others() -> None:
    kept = {reserve_port("127.0.0.1") for _ in range(400)}
    with ExitStack() as stack:
        others = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(400)]
        assert kept.isdisjoint(other.getsockname()[1] for other in others)  # of 28,000: at random, some would be there
        stack.enter_context(socket.create_server(("127.0.0.1", kept.pop())))


def test_an_instance_that_is_killed_or_too_slow_is_an_error_and_the_next_call_works() -> None:
    async def scenario() -> None:
        kill = FunctionFault(kind=FunctionFaultKind.KILL, after_seconds=0.1)
        async with cloud_of(google=(google("sleep"),), faults=FunctionFaultPlan(script=(None, kill))) as cloud:
            assert [await get(cloud, f"/?seconds={seconds}") for seconds in (0, 60, 0)] == [200, 503, 200]
            figures = cloud.statistics()["sleep"]
            assert (figures.cold_starts, figures.errors, figures.faults) == (2, 1, {"kill": 1})
        async with cloud_of(google=(google("sleep", timeout_seconds=1.0),)) as cloud:
            assert [await get(cloud, "/?seconds=3") for _ in range(2)] == [504, 504]
            figures = cloud.statistics()["sleep"]
            assert (figures.cold_starts, figures.errors) == (1, 2)

    asyncio.run(scenario())


def test_an_instance_that_is_taken_back_may_finish_what_it_has_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "calls"
        finishing = google("finish", environment={"NOTE_FILE": str(file)})
        async with cloud_of(google=(finishing,), tmp="folder") as cloud:

            async def ask() -> None:
                async with page_of(cloud.google_urls["finish"]) as answer:
                    await answer.read()

            asking = asyncio.create_task(ask())
            await until(lambda: file.exists() and file.read_text())
        await asyncio.gather(asking, return_exceptions=True)
        assert file.read_text().splitlines() == ['{"begun": true}', '{"ended": true}']

    asyncio.run(scenario())


def test_objects_of_the_local_gcs_reach_the_function_until_it_acknowledges_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "events"
        note = google("note", signature="cloudevent", environment={"NOTE_FILE": str(file)})
        async with (
            LocalGcs() as gcs,
            cloud_of(
                gcs=gcs,
                tmp="folder",
                google=(note,),
                queues=(QueueSpec(name="q", visibility_seconds=3.0),),
                finalized=(ObjectFinalized(bucket="stoker", function="note", queue="q", concurrency=1),),
            ) as cloud,
        ):
            for name in ("good", "bad", "with%20blank%20%C3%BC"):
                target = f"{gcs.url}/upload/storage/v1/b/stoker/o?uploadType=media&name={name}"
                async with page_of(target, "POST", data=b"abc") as answer:
                    assert answer.status == 200
            await until(lambda: file.exists() and len(file.read_text().splitlines()) >= 4)
            await cloud.queues["q"].wait_until_empty()
            events = [json.loads(line) for line in file.read_text().splitlines()]
            names = [event["name"] for event in events]
            assert set(names) == {"bad", "good", "with blank ü"}  # at least once
            assert names.count("bad") >= 2
            assert events[0]["type"] == "google.cloud.storage.object.v1.finalized"
            assert events[0]["source"] == "//storage.googleapis.com/projects/_/buckets/stoker"

    asyncio.run(scenario())


def test_a_function_that_cannot_be_loaded_is_unavailable(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "broken.py").write_text("raise RuntimeError('this module is broken')\n")
        broken = google("f", source=str(tmp_path / "broken.py"))
        async with cloud_of(google=(broken,)) as cloud:
            async with page_of(cloud.google_urls["f"]) as answer:
                assert answer.status == 503
            await until(lambda: "this module is broken" in cloud.log("f"))

    asyncio.run(scenario())
