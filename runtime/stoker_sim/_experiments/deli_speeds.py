"""DELI's Table I: how fast a bucket and a disk give small samples; and what the same bucket gives in super-samples."""

from __future__ import annotations

from stoker._diagnostics.latency import BucketModel, Constant
from stoker._fetch.config import FetchConfig
from stoker._fetch.feed import FeedConfig
from stoker._order.order import OrderConfig
from stoker_sim._experiments.deli_workloads import SOURCE
from stoker_sim._experiments.outcome import Experiment, Outcome, Panel, Series, Table
from stoker_sim._models.dataset import described
from stoker_sim._scenarios.scenario import Scenario, simulate

__all__ = ["BUCKET", "EXPERIMENTS"]

_GET_SECONDS = 0.055
_GETS_PER_SECOND = 100.0
_SAMPLE_BYTES = 2_740
"""What 49.80 kB/s are at one request after the other: the paper does not say how large the objects were."""
_SUPER_SAMPLE_BYTES = 8 << 20
_CONNECTION_BYTES_PER_SECOND = 20e6

BUCKET = BucketModel(
    first_byte=Constant(_GET_SECONDS),
    requests_per_second=_GETS_PER_SECOND,
    connection_bytes_per_second=_CONNECTION_BYTES_PER_SECOND,
)
"""Its bucket, as one node saw it: 55 ms a request, 100 requests a second with 16 threads. The rate of a large transfer
is not in the paper; 20 MB/s is what a small machine of its time is known to get."""


def _bytes_per_second(samples: int, of_one_object: int, at_once: int) -> float:
    """Return what a node reads of objects that hold so many samples, so many at once."""
    objects = max(2, samples // of_one_object)
    manifest = described(super_samples=objects, samples=of_one_object, super_sample_bytes=of_one_object * _SAMPLE_BYTES)
    fetch = FetchConfig(hedge=False, concurrency_start=at_once, concurrency_least=1, concurrency_most=at_once)
    feed = FeedConfig(
        order=OrderConfig(shuffle="none"),
        batch_size=of_one_object,
        memory_bytes=manifest.file_bytes + 128 * manifest.largest_bytes + (1 << 20),
        fetch=fetch,
    )
    run = simulate(Scenario(manifest=manifest, feed=feed, bucket=BUCKET))
    return run.read_bytes / run.seconds


def _table_1(quick: bool) -> Outcome:
    samples = 500 if quick else 5_000
    large = _SUPER_SAMPLE_BYTES // _SAMPLE_BYTES
    rows: list[tuple[str, float | None, float | None]] = [
        ("disk", None, 18.63e6),
        ("bucket, one request after the other", _bytes_per_second(samples // 5, 1, 1), 49.80e3),
        ("bucket, 16 requests at once", _bytes_per_second(samples, 1, 16), 281.73e3),
        ("bucket, super-samples of 8 MiB, one after the other", _bytes_per_second(20 * large, large, 1), None),
        ("bucket, super-samples of 8 MiB, 16 at once", _bytes_per_second(100 * large, large, 16), None),
    ]
    ours = [rate for _, rate, _ in rows]
    table = Table(
        name="deli-table-1",
        columns=("read from", "kB/s", "published kB/s", "difference"),
        rows=[
            (
                name,
                None if rate is None else rate / 1e3,
                None if known is None else known / 1e3,
                None if rate is None or known is None else rate / known - 1,
            )
            for name, rate, known in rows
        ],
    )
    names = ["disk", "1 request", "16 requests", "8 MiB", "16 times 8 MiB"]
    series = [
        Series(
            name="simulated", x=names, y=[float("nan") if rate is None else rate / 1e3 for rate in ours], kind="bars"
        ),
        Series(
            name="published",
            x=names,
            y=[float("nan") if known is None else known / 1e3 for _, _, known in rows],
            is_published=True,
            kind="bars",
        ),
    ]
    panel = Panel(title="Reading MNIST", x_label="", y_label="kB/s", series=series, y_log=True)
    limits = f"{_GET_SECONDS * 1e3:.0f} ms and {_GETS_PER_SECOND:.0f} are answered a second"
    remarks = (
        f"A request takes {limits}, as the authors' measurements have it.",
        f"{_SAMPLE_BYTES:,} bytes a sample make the first rate what it is, so only the others are predicted.",
        f"Super-samples: {_CONNECTION_BYTES_PER_SECOND / 1e6:.0f} MB/s a connection are an assumption.",
        "The disk is not simulated.",
    )
    return Outcome(tables=[table], panels=[panel], remarks=remarks)


EXPERIMENTS = {
    "deli-table-1": Experiment(name="deli-table-1", title="Speed of reading small samples", source=SOURCE, run=_table_1)
}
"""By name."""
