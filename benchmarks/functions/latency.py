"""Latency of invocations, with a cold start and on a warm instance."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from aiohttp.test_utils import make_mocked_request

from benchmarks.document import table
from benchmarks.functions.quiet import Patience
from benchmarks.functions.stage import DATA, Stage, function, pack_event, stage
from stoker_functions._shuffle_job.work import ShuffleTask
from stoker_local import PROFILES
from stoker_local._s3.model import ObjectCreated
from stoker_local.functions._endpoints import request_event
from stoker_local.functions._triggers import LocalMessage, batch_event, created_message
from stoker_warm._events import NodeTask, WakeEvent

__all__ = ["latency"]

ROUNDS = 3
WARM_CALLS = 3  # per round
SHAPES = {"none": "at once", "cloud": "20 ms"}
SMALL_BYTES, LARGE_BYTES = 3_000, 110_000
SERVED_SAMPLES = 40
SERVED_BYTES = 1 << 20
SLICES = 10
BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured call of a function.

    Attributes:
        title: title in the table.
        function: name of the function.
        prepare: function that creates an event whose work is not done yet.
        expected: fields that the result must have.
    """

    title: str
    function: str
    prepare: Callable[[], Awaitable[Any]]
    expected: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One invocation.

    Attributes:
        init_seconds: duration of the instance's start; 0 on a warm one.
        seconds: time from the start of the instance, or of the warm invocation, to its end.
        requests: number of requests to the bucket.
    """

    init_seconds: float
    seconds: float
    requests: int


class Cases:
    """The calls of all functions."""

    def __init__(self, place: Stage) -> None:
        self._place = place
        self._serial = itertools.count()
        self._raw = place.put_raw("small", 10, SMALL_BYTES)

    def all(self) -> dict[str, Case]:
        """Return the calls by name."""
        done, answered = {"state": "complete"}, {"statusCode": 200}
        rows: tuple[tuple[str, str, str, Callable[[], Awaitable[Any]], Mapping[str, Any]], ...] = (
            ("nothing", "a handler that does nothing", "nothing", self._nothing, {}),
            ("pack", "`pack`, ten objects of 3 KB", "pack", self._pack, {"samples": 10, **done}),
            ("ingest", "`ingest`, one message", "ingest", self._ingest, {"batchItemFailures": []}),
            ("commit", "`commit`, one run waiting", "commit", self._commit, {"runs": 1}),
            ("compact", "`compact`, nothing to gain", "compact", self._compact, {"objects_before": 0, **done}),
            ("shuffle", "`shuffle`, a slice of four samples", "shuffle", self._shuffle, done),
            ("super-sample", "`serve`, a super-sample of 1 MiB", "serve", self._super_sample, answered),
            ("batch", f"`serve`, a batch of {BATCH} of 110 KB", "serve", self._batch, answered),
            ("node", "`warm_node`, a call that keeps it warm", "warm_node", self._keep, {"held_bytes": 0}),
        )
        return {
            name: Case(title=title, function=function, prepare=prepare, expected=expected)
            for name, title, function, prepare, expected in rows
        }

    async def prepare(self) -> None:
        """Create the data set that is compacted, shuffled and served."""
        objects = self._place.put_raw("large", SERVED_SAMPLES, LARGE_BYTES)
        await self._place.invoke("pack", pack_event("large", objects, "served", SERVED_BYTES))
        await self._place.invoke("commit", {"dataset": f"{DATA}/served"})

    async def _nothing(self) -> Any:
        return {}

    async def _pack(self) -> Any:
        return pack_event("small", self._raw, f"packed-{next(self._serial)}")

    async def _ingest(self) -> Any:
        key = f"taken/{next(self._serial)}.bin"
        stored = self._place.bucket.put("raw", key, bytes(SMALL_BYTES))
        created = ObjectCreated(bucket="raw", key=key, event="ObjectCreated:Put", stored=stored)
        now = time.time()
        delivery = LocalMessage(
            receipt="1",
            message_id="1",
            body=created_message(created, region="us-east-1", sequence=1),
            sent_at=now,
            first_received_at=now,
            receive_count=1,
        )
        return batch_event([delivery], queue_arn="arn:aws:sqs:us-east-1:000000000000:raw")

    async def _commit(self) -> Any:
        """Prepare a version with one run, and another uncommitted run."""
        event, objects = {"dataset": f"{DATA}/taken"}, self._place.bucket.objects["data"]
        for key in [key for key in objects if key.startswith("taken/")]:
            del objects[key]
        await self._place.invoke("ingest", await self._ingest())
        await self._place.invoke("commit", event)
        await self._place.invoke("ingest", await self._ingest())
        return event

    async def _compact(self) -> Any:
        return {"dataset": f"{DATA}/served", "super_sample_bytes": SERVED_BYTES}

    async def _shuffle(self) -> Any:
        task = ShuffleTask(
            dataset=f"{DATA}/served",
            version=1,
            seed=7,
            epoch=next(self._serial),
            lanes=1,
            way="ranged",
            slices=SLICES,
            scatters=0,
            object_bytes=SERVED_BYTES,
            step="slice",
            part=0,
        )
        return task.to_event()

    async def _keep(self) -> Any:
        return WakeEvent(node="warm-0", proxy="none:0", task=NodeTask.WARM).to_event()

    async def _super_sample(self) -> Any:
        return _request("/v1/served/super-samples/0")

    async def _batch(self) -> Any:
        """Request a batch of another epoch each time."""
        return _request("/v1/served/batches/0", f"size={BATCH}&epoch={next(self._serial)}")


def _request(path: str, query: str = "") -> dict[str, Any]:
    request = make_mocked_request("GET", f"{path}?{query}" if query else path)
    return request_event(request, b"", caller="", request_id="1", received_at=time.time())


Samples = Mapping[tuple[str, str, str], list[Sample]]
"""Name of the call, shape, ``cold`` or ``warm`` → invocations."""


async def latency(patience: Patience) -> str:
    """Measure, and return the table."""
    names = ("pack", "ingest", "commit", "compact", "shuffle", "serve", "warm_node")
    functions = [function("nothing", "benchmarks.functions.handlers.nothing"), *map(function, names)]
    found: dict[tuple[str, str, str], list[Sample]] = defaultdict(list)
    async with stage(*functions, shape=PROFILES["none"]) as place:
        made = Cases(place)
        await made.prepare()
        cases = made.all()
        for number in range(ROUNDS):
            for shape in SHAPES:
                place.bucket.reshape(PROFILES[shape])
                for what, case in cases.items():
                    cold, *warm = await patience.measure(partial(calls, place, case))
                    found[what, shape, "cold"].append(cold)
                    found[what, shape, "warm"] += warm
            print(f"round {number} of {ROUNDS}", flush=True)
        return text(found, {what: case.title for what, case in cases.items()})


async def calls(place: Stage, case: Case) -> list[Sample]:
    """Call a function once cold, then a few times warm."""
    return [await call_once(place, case, is_cold=number == 0) for number in range(1 + WARM_CALLS)]


async def call_once(place: Stage, case: Case, *, is_cold: bool) -> Sample:
    """Call a function once.

    Raises:
        RuntimeError: its result is not the expected one.
    """
    event = await case.prepare()
    if is_cold:
        place.cloud.reclaim()
        while any(figures.instances for figures in place.cloud.statistics().values()):  # noqa: ASYNC110  (no event)
            await asyncio.sleep(0.05)
    with place.measure() as usage:
        outcome = await place.invoke(case.function, event)
    result = json.loads(outcome.payload)
    if outcome.is_cold != is_cold or {**result, **case.expected} != result:
        raise RuntimeError(f"{case.title}: cold is {outcome.is_cold}, and the result {str(result)[:1000]}")
    init_seconds = outcome.init_seconds or 0.0
    return Sample(init_seconds=init_seconds, seconds=init_seconds + outcome.seconds, requests=usage.requests.total())


def text(found: Samples, titles: Mapping[str, str]) -> str:
    """Return the table of medians."""

    def milliseconds(what: str, shape: str, kind: str) -> str:
        return f"{median(each.seconds for each in found[what, shape, kind]) * 1000:,.0f}"

    def requests(what: str) -> str:
        cold, warm = (median(each.requests for each in found[what, "none", kind]) for kind in ("cold", "warm"))
        return f"{cold:.0f}, {warm:.0f}"

    rows = []
    for what, title in titles.items():
        starts = [each.init_seconds for shape in SHAPES for each in found[what, shape, "cold"]]
        figures = [milliseconds(what, shape, kind) for shape in SHAPES for kind in ("cold", "warm")]
        rows.append([title, f"{median(starts) * 1000:,.0f}", *figures, requests(what)])
    head = ["milliseconds", "INIT"]
    head += [f"{kind}, first byte {when}" for when in SHAPES.values() for kind in ("cold", "warm")]
    return table([*head, "requests: cold, warm"], rows)
