"""What the demo tells at its end: both ways side by side, and why they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker._base.meter import Reading
from stoker._base.operations import Operation
from stoker._base.sizes import format_bytes
from stoker._cost.prices import Prices
from stoker_local._demo.training import Timing

__all__ = ["Result", "failures", "how_counted", "read_counts", "table", "why"]

_OPERATIONS = {
    "GetObject": Operation.GET,
    "HeadObject": Operation.HEAD,
    "ListObjectsV2": Operation.LIST,
    "PutObject": Operation.PUT,
    "DeleteObject": Operation.DELETE,
    "DeleteObjects": Operation.DELETE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one way of reading did.

    Attributes:
        name: of the way.
        workers: how many it has, in words.
        accuracy: on the test images, 0 to 1.
        timing: of the training.
        reading: what the bucket counted.
    """

    name: str
    workers: str
    accuracy: float
    timing: Timing
    reading: Reading


def read_counts(url: str, counts: Mapping[str, Any]) -> Reading:
    """Return the bucket's own counters as a reading of stoker's meter, which knows the prices."""
    requests: Counter[Operation] = Counter(dict.fromkeys(Operation, 0))
    for name, count in counts["requests"].items():
        requests[_OPERATIONS[name]] += count
    return Reading(
        url=url,
        egress="same_region",
        requests=requests,
        not_billed=Counter(),
        failed=0,
        cancelled=0,
        read_bytes=counts["bytes_out"],
        broken_bytes=0,
        written_bytes=0,
    )


def table(direct: Result, loader: Result, prices: Prices) -> list[str]:
    """Return the lines of a table, narrower than 80 columns."""
    columns = [_cells(result, prices) for result in (direct, loader)]
    rows = [(label, left, right) for (label, left), (_, right) in zip(*columns, strict=True)]
    first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"  {label:<{first}}   {left:>{second}}   {right:>{third}}" for label, left, right in rows]
    return [*lines[:2], "  " + "-" * (len(lines[0]) - 2), *lines[2:]]


def _cells(result: Result, prices: Prices) -> list[tuple[str, str]]:
    timing, reading = result.timing, result.reading
    return [
        ("", result.name),
        ("", result.workers),
        ("test accuracy", f"{result.accuracy:.1%}"),
        ("wait for data", f"{timing.wait_seconds:.2f} s"),
        ("stall", f"{timing.stall:.1%}"),
        ("GETs", f"{reading.requests[Operation.GET]:,}"),
        ("bytes", format_bytes(reading.read_bytes)),
        ("dollars", f"${prices.dollars(reading):.6f}"),
        ("time to first batch", f"{timing.first_batch_seconds:.2f} s"),
        ("total time", f"{timing.total_seconds:.2f} s"),
    ]


def why(direct: Result, loader: Result, bucket_wait_seconds: float) -> str:
    """Return what explains the difference.

    Args:
        direct: one object per image.
        loader: super-samples.
        bucket_wait_seconds: of the loader's wait, the part that was for the bucket.
    """
    gets = [result.reading.requests[Operation.GET] for result in (direct, loader)]
    return (
        f"a GET waits for its first byte however little it asks for. The DataLoader sent {gets[0]:,}, one per image "
        f"and epoch, as many at a time as it has workers, and these compete with the model for the processor. The "
        f"Loader sent {gets[1]:,}, known in advance and under way while the model trains: it waited "
        f"{bucket_wait_seconds:.2f} s for the bucket, the rest for gathering and decoding. These images are tiny; "
        "the larger they are, the more bytes count and the less GETs do."
    )


def how_counted(loader: Result, prices: Prices) -> str:
    """Return where the figures come from."""
    store = prices.store(loader.reading.url)
    return (
        "by the bucket itself; the DataLoader's bytes and dollars include listing the images once. Dollars are what "
        f"stoker's meter makes of these counts at the list prices of {store.name}, {store.region}, {prices.date}."
    )


def failures(direct: Result, loader: Result, least_accuracy: float) -> list[str]:
    """Return what is not as the demo promises, in words."""
    found = [
        f"with the {result.name} the model reached {result.accuracy:.1%}, not {least_accuracy:.0%}"
        for result in (direct, loader)
        if result.accuracy < least_accuracy
    ]
    if loader.timing.stall >= direct.timing.stall:
        found.append(f"the {loader.name} stalled no less than the {direct.name}")
    return found
