from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from stoker.testing import run_virtual
from stoker_local.functions import EventSource, LocalQueue, Outcome, QueueSpec, ServiceError
from stoker_local.functions._statistics import MAX_REQUEST_BYTES
from stoker_local.functions._triggers import LocalMessage, batch_event, failed_messages, poll_queue
from support.cases import for_each

BATCH = [
    LocalMessage(
        receipt=f"r{i}", message_id=f"m{i}", body=f"body {i}", sent_at=1.5, first_received_at=2.5, receive_count=3
    )
    for i in range(3)
]
EVERYTHING = {"m0", "m1", "m2"}


def outcome(result: Any, error_type: str = "") -> Outcome:
    return Outcome(
        request_id="r",
        payload=result if isinstance(result, bytes) else json.dumps(result).encode(),
        error_type=error_type,
        seconds=0.0,
        init_seconds=None,
        billed_milliseconds=1,
        memory_bytes=0,
        log=b"",
    )


def test_a_batch_is_what_lambda_hands_to_functions() -> None:
    event = batch_event(BATCH, queue_arn="arn:aws:sqs:eu-west-1:1:q")
    record = event["Records"][1]
    assert record["messageId"] == "m1"
    assert record["body"] == "body 1"
    assert record["md5OfBody"] == "744d6dbfdbed0707e1db5a0d9967710f"
    assert record["attributes"]["ApproximateReceiveCount"] == "3"
    assert record["attributes"]["SentTimestamp"] == "1500"
    assert (record["eventSource"], record["awsRegion"]) == ("aws:sqs", "eu-west-1")


@pytest.mark.parametrize("result", [None, {}, {"batchItemFailures": []}, {"batchItemFailures": None}])
def test_a_batch_of_which_no_failure_is_reported_has_succeeded(result: Any) -> None:
    assert failed_messages(BATCH, outcome(result), reports_failures=True) == set()


def test_the_messages_that_are_named_have_failed() -> None:
    result = {"batchItemFailures": [{"itemIdentifier": "m2"}, {"itemIdentifier": "m0"}]}
    assert failed_messages(BATCH, outcome(result), reports_failures=True) == {"m0", "m2"}


@for_each(
    "result",
    [
        b"not json",
        b"[" * 100_000,
        "text",
        [],
        {"batchItemFailures": 3},
        {"batchItemFailures": "m1"},
        {"batchItemFailures": ["m1"]},
        {"batchItemFailures": [{}]},
        {"batchItemFailures": [{"itemIdentifier": ""}]},
        {"batchItemFailures": [{"itemIdentifier": None}]},
        {"batchItemFailures": [{"itemIdentifier": ["m1"]}]},
        {"batchItemFailures": [{"itemIdentifier": "m1"}, {"itemIdentifier": "of another batch"}]},
    ],
)
def test_a_report_that_cannot_be_understood_fails_the_whole_batch(result: Any) -> None:
    assert failed_messages(BATCH, outcome(result), reports_failures=True) == EVERYTHING


@pytest.mark.parametrize(("body", "count"), [("x", 10_000), ("ü" * 300, 10_000), ('"' * 500_000, 20)])
def test_no_batch_is_larger_than_an_event_may_be(body: str, count: int) -> None:
    sizes: list[int] = []

    async def invoke(event: dict[str, Any]) -> Outcome:
        sizes.append(len(json.dumps(event).encode()))
        return outcome(None)

    async def scenario() -> None:
        queue = LocalQueue(QueueSpec(name="q"), chance=random.Random(1))
        for _ in range(count):
            queue.send(body)
        source = EventSource(queue="q", function="f", batch_size=10_000)
        arn = "arn:aws:sqs:eu-central-1:123456789012:" + "q" * 80
        polling = asyncio.create_task(poll_queue(source, queue, invoke, queue_arn=arn))
        await queue.wait_until_empty()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)

    run_virtual(scenario())
    assert len(sizes) > 1
    assert 5_000_000 < max(sizes) <= MAX_REQUEST_BYTES


def test_a_batch_that_was_throttled_is_left_to_the_queue() -> None:
    answers: list[Any] = [ServiceError("TooManyRequestsException", "Rate Exceeded."), outcome(None)]

    async def invoke(event: dict[str, Any]) -> Outcome:
        answer = answers.pop(0)
        if isinstance(answer, ServiceError):
            raise answer
        assert isinstance(answer, Outcome)
        return answer

    async def scenario() -> float:
        queue = LocalQueue(QueueSpec(name="q", visibility_seconds=30.0), chance=random.Random(1))
        queue.send("a")
        source = EventSource(queue="q", function="f")
        polling = asyncio.create_task(poll_queue(source, queue, invoke, queue_arn="arn:aws:sqs:r:1:q"))
        await queue.wait_until_empty()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(30.0)
    assert answers == []


def test_a_function_that_failed_has_failed_with_all_messages() -> None:
    assert failed_messages(BATCH, outcome({}, error_type="ValueError"), reports_failures=True) == EVERYTHING


def test_without_reports_a_batch_succeeds_or_fails_whole() -> None:
    result = {"batchItemFailures": [{"itemIdentifier": "m2"}]}
    assert failed_messages(BATCH, outcome(result), reports_failures=False) == set()
    assert failed_messages(BATCH, outcome(result, error_type="E"), reports_failures=False) == EVERYTHING
