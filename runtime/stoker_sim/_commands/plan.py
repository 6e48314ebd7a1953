"""``stoker plan``: predict the time and cost of a training on a data set, and suggest settings."""

from __future__ import annotations

import asyncio
import math
import shlex
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from stoker._base.machine import inspect_machine
from stoker._base.meter import Egress
from stoker._base.sizes import format_bytes, format_dollars
from stoker._cluster.peers import SETTLE_SECONDS
from stoker._cost.prices import Prices, StorePrices
from stoker._diagnostics.latency import BucketModel, Constant
from stoker._diagnostics.probe import MIN_PROBE_BYTES, Probe, ProbeLimits, probe
from stoker._fetch.config import Continuous, NextBatch, PipelineConfig, Schedule
from stoker._fetch.super_samples import read_shares
from stoker._format.versions import read_manifest
from stoker._order.order import MAX_LANES, OrderConfig, Shuffle
from stoker._stores.object_store import price_key
from stoker.cli.flags import (
    add_dataset,
    add_json,
    cluster_spec,
    number_from,
    open_store_from_args,
    positive,
    rate_from,
    size,
    size_from,
)
from stoker.cli.output import format_count, json_text, make_printable, table
from stoker.errors import ConfigError
from stoker_sim._advice import Advice, Resources, Suggestion, advise
from stoker_sim._cluster import NETWORK_BYTES_PER_SECOND, START_SECONDS, ClusterModel
from stoker_sim._predict import EpochForecast, Prediction
from stoker_sim._processor import ProcessorModel
from stoker_sim._scenario import MAX_FIRST_BYTE_SECONDS, MIN_BYTES_PER_SECOND
from stoker_sim._training import PlannedTraining

_WIDTH = 80
_CONNECTION_BYTES_PER_SECOND = 90e6
"""Assumed rate of one connection to an object store if none was measured."""
_SCHEDULES: Mapping[str, Schedule] = {"continuous": Continuous(), "next-batch": NextBatch()}


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    training = parser.add_argument_group("the training")
    rate = "samples per second that one accelerator (one rank) trains"
    training.add_argument("--gpu-rate", type=number_from(0.001, 1e12), required=True, metavar="N", help=rate)
    training.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of nodes (default: 1)")
    ranks = "ranks of a node, one per accelerator; they share its network, memory and disk (default: 1)"
    training.add_argument("--ranks-per-node", type=positive, default=1, metavar="N", help=ranks)
    training.add_argument("--epochs", type=positive, default=10, metavar="N", help="epochs of the run (default: 10)")
    hour = number_from(0.0, 1e9)
    training.add_argument("--price-of-hour", type=hour, metavar="USD", help="price of one node per hour")
    first_byte = number_from(0.001, 1000 * MAX_FIRST_BYTE_SECONDS)
    node = parser.add_argument_group("a node", "values that are left out are measured on this machine")
    node.add_argument("--memory", type=size, metavar="SIZE", help="memory of all loaders (default: half of the free)")
    node.add_argument("--disk", type=size, default=0, metavar="SIZE", help="disk space for a cache (default: none)")
    node.add_argument("--disk-folder", default="/mnt/nvme/stoker", metavar="PATH", help="folder of that cache")
    node.add_argument("--first-byte", type=first_byte, metavar="MS", help="milliseconds to the bucket's first byte")
    bandwidth = rate_from(MIN_BYTES_PER_SECOND)
    node.add_argument("--bandwidth", type=bandwidth, metavar="RATE", help="bandwidth from the bucket, such as 10Gbit")
    network = f"bandwidth between nodes with --cluster (default: {NETWORK_BYTES_PER_SECOND / 1e6:.0f}MB)"
    node.add_argument("--network", type=bandwidth, metavar="RATE", help=network)
    limit = "requests per second that the bucket answers, of all nodes together (default: measured)"
    node.add_argument("--requests-per-second", type=number_from(0.1, 1e9), metavar="N", help=limit)
    probed, read = size_from(MIN_PROBE_BYTES), "maximum number of bytes to read for the measurement (default: 256MiB)"
    node.add_argument("--probe", type=probed, default=256 << 20, metavar="SIZE", help=read)
    node.add_argument("--egress", choices=get_args(Egress), default="same_region", help="distance to the bucket")
    now = parser.add_argument_group("present settings of each rank's loader", "by default those of Loader")
    now.add_argument("--batch-size", type=positive, default=256, metavar="N", help="samples per rank (default: 256)")
    names = "columns that are read, separated by commas (default: all)"
    now.add_argument("--columns", type=_split_names, metavar="NAMES", help=names)
    shuffles, shuffled = get_args(Shuffle), "kind of shuffle (default: window; full is planned with --cluster)"
    now.add_argument("--shuffle", choices=shuffles, default="window", help=shuffled)
    now.add_argument("--window", type=positive, default=8, metavar="N", help="window in super-samples (default: 8)")
    memory = "memory budget (default: 512MB)"
    now.add_argument("--loader-memory", type=size, default=512_000_000, metavar="SIZE", help=memory)
    cluster = "cache of all nodes, such as memory:?limit=64GB, the limit of each node (default: none)"
    now.add_argument("--cluster", type=cluster_spec, metavar="SPEC", help=cluster)
    now.add_argument("--schedule", choices=_SCHEDULES, default="continuous", help="schedule (default: continuous)")
    _add_processor(parser)
    add_json(parser)
    parser.set_defaults(example="stoker plan s3://bucket/dataset --gpu-rate 3000 --nodes 4 --ranks-per-node 8")


_PROCESSOR_COSTS = {
    "request": (115.0, "US", "microseconds for a request"),
    "gb": (0.27, "S", "seconds to receive and verify a GB"),
    "batch": (32.0, "US", "microseconds for a batch"),
    "value": (8.5, "NS", "nanoseconds to gather a value, one column of a sample"),
    "gathered-gb": (0.1, "S", "seconds to gather a GB"),
    "new-gb": (0.6, "S", "seconds for the first write to a GB of memory"),
}
"""Name of a cost → its default, measured by `python -m benchmarks.processor_costs`, its unit, and what it is."""


def _add_processor(parser: ArgumentParser) -> None:
    about = "processor time of one core, of each rank's loader; `python -m benchmarks.processor_costs` measures it"
    group = parser.add_argument_group("processor time", about)
    cores = "cores of a node, which its ranks share (default: those of this machine)"
    group.add_argument("--cores", type=number_from(0.01, 1e6), metavar="N", help=cores)
    for name, (default, unit, cost) in _PROCESSOR_COSTS.items():
        help_text = f"{cost} (default: {default:g})"
        group.add_argument(
            f"--cpu-per-{name}", type=number_from(0.0, 1e9), default=default, metavar=unit, help=help_text
        )


def _model_processor(args: Namespace, sample_bytes: float, values: int) -> ProcessorModel:
    """Return the processor time of a loader whose samples have ``values`` columns of ``sample_bytes`` together."""
    sample_seconds = (
        1e-6 * args.cpu_per_batch / args.batch_size
        + 1e-9 * args.cpu_per_value * values
        + 1e-9 * args.cpu_per_gathered_gb * sample_bytes
    )
    return ProcessorModel(
        cores=inspect_machine().cores if args.cores is None else args.cores,
        request_seconds=1e-6 * args.cpu_per_request,
        fetched_byte_seconds=1e-9 * args.cpu_per_gb,
        sample_seconds=sample_seconds,
        new_byte_seconds=1e-9 * args.cpu_per_new_gb,
        sample_bytes=sample_bytes,
    )


def _model_cluster(args: Namespace) -> ClusterModel | None:
    """Return the cluster cache; None without one."""
    if args.cluster is None:
        if args.network is not None:
            raise ConfigError("--network, the bandwidth between nodes, has no effect without --cluster")
        return None
    return ClusterModel(
        machines=args.nodes,
        limit_bytes=args.cluster.limit_bytes,
        network_bytes_per_second=args.network or NETWORK_BYTES_PER_SECOND,
    )


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    workload, resources, measured, prices = asyncio.run(_measure(args, _create_pipeline_config(args), Prices.load()))
    plan = _Plan(args, workload, resources, measured, prices, advise(workload, resources))
    print(json_text(plan.as_json()) if args.json else "\n".join(plan.as_text()))
    return 0


def _create_pipeline_config(args: Namespace) -> PipelineConfig:
    """Return the present settings of the loader, validated before anything is read."""
    ranks = args.nodes * args.ranks_per_node
    if ranks > MAX_LANES:
        raise ConfigError(
            f"--nodes {args.nodes} with --ranks-per-node {args.ranks_per_node} are {ranks:,} ranks, more than the "
            f"{MAX_LANES:,} that can share an epoch: give fewer"
        )
    return PipelineConfig(
        order=OrderConfig(shuffle=args.shuffle, window=args.window, lanes=ranks),
        batch_size=args.batch_size,
        world_size=ranks,
        memory_bytes=args.loader_memory,
        schedule=_SCHEDULES[args.schedule],
    )


async def _measure(
    args: Namespace, feed: PipelineConfig, prices: Prices
) -> tuple[PlannedTraining, Resources, Probe | None, StorePrices]:
    """Read the manifest and, if the workload is valid, measure the figures that were not given."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with open_store_from_args(args) as store:
        store_prices = prices.store(price_key(store))
        opened_seconds = loop.time() - begun
        manifest = await read_manifest(store, args.at)
        read_seconds = loop.time() - begun
        if not manifest.samples:
            raise ConfigError(f"{args.url} holds no samples yet: pack some before you plan")
        columns = manifest.schema.select(args.columns)
        workload = PlannedTraining(
            manifest=manifest,
            feed=feed,
            samples_per_second=args.gpu_rate,
            ranks_per_node=args.ranks_per_node,
            read_shares=read_shares(manifest, columns),
            cluster=_model_cluster(args),
        )
        processor = _model_processor(args, workload.sample_bytes, len(columns))
        workload = replace(workload, processor=processor)
        measured = None
        if args.first_byte is None or args.bandwidth is None:
            limits = ProbeLimits(size_bytes=args.probe)
            measured = await probe(store, [manifest.ref(row) for row in _probe_rows(len(manifest))], limits)
    plan = _add_bucket(args, workload, measured, (read_seconds - opened_seconds, read_seconds))
    return *plan, measured, store_prices


def _probe_rows(count: int) -> Sequence[int]:
    """Return 64 to 127 row numbers, spread evenly over the data set; all if it has fewer than 64."""
    return range(0, count, max(1, count // 64))


def _add_bucket(
    args: Namespace, workload: PlannedTraining, measured: Probe | None, read_seconds: tuple[float, float]
) -> tuple[PlannedTraining, Resources]:
    """Return the workload with a model of the bucket, and the resources of a rank and its node.

    Args:
        args: arguments of the command line; given figures replace measured ones.
        workload: the workload, with a default bucket.
        measured: result of the probe; None if all figures were given.
        read_seconds: duration of opening the store and reading the manifest, in seconds, without and with imports.
    """
    if measured is not None:
        model, total = measured.bucket(), measured.total_bytes_per_second
        median_seconds, slowest_seconds = measured.median_seconds, measured.slowest_seconds
        start_seconds, connecting = read_seconds[1] + measured.connect_seconds, measured.connect_range_seconds
    else:
        model, total, median_seconds, slowest_seconds = BucketModel(), math.inf, 0.0, 0.0
        start_seconds, connecting = read_seconds[1], (0.0, 0.0)
    starts = (read_seconds[0] + connecting[0], read_seconds[1] + connecting[1])
    if args.first_byte is not None:
        median_seconds = slowest_seconds = start_seconds = args.first_byte / 1000
        model, starts = replace(model, first_byte=Constant(median_seconds)), (start_seconds, start_seconds)
    rate = model.connection_bytes_per_second if measured else _CONNECTION_BYTES_PER_SECOND
    if args.bandwidth is not None:
        total, rate = args.bandwidth, min(rate, args.bandwidth)
    if args.requests_per_second is not None:
        model = replace(model, requests_per_second=args.requests_per_second, max_queue_seconds=math.inf, burst=1)
    if workload.cluster is not None:
        start_seconds += START_SECONDS
        starts = (starts[0] + START_SECONDS, starts[1] + START_SECONDS + SETTLE_SECONDS)
    memory_bytes = inspect_machine().free_bytes // 2 if args.memory is None else args.memory
    return replace(
        workload,
        bucket=replace(model, connection_bytes_per_second=rate),
        node_bytes_per_second=total,
        start_seconds=start_seconds,
        start_range_seconds=starts,
    ), Resources(
        memory_bytes=memory_bytes // args.ranks_per_node,
        disk_bytes=args.disk,
        disk_folder=args.disk_folder,
        slowest_seconds=slowest_seconds,
        median_seconds=median_seconds,
        epochs=args.epochs,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The command's arguments and results; ``probe`` is None if all figures were given."""

    args: Namespace
    workload: PlannedTraining
    resources: Resources
    probe: Probe | None
    prices: StorePrices
    advice: Advice

    def dollars(self, epoch: EpochForecast) -> float:
        """Return the bucket's price of an epoch of all nodes, in dollars."""
        return epoch.dollars(self.prices, self.args.egress)

    def waiting_dollars(self, epoch: EpochForecast) -> float | None:
        """Return the cost of all nodes while they wait, in dollars; None if their price is not given."""
        hour = self.args.price_of_hour
        return None if hour is None else epoch.wait_seconds / 3600 * self.args.nodes * hour

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` writes."""
        manifest, advice = self.workload.manifest, self.advice
        return {
            "url": self.args.url,
            "version": manifest.version,
            "samples": manifest.samples,
            "super_samples": len(manifest),
            "size_bytes": manifest.size_bytes,
            "nodes": self.workload.nodes,
            "ranks_per_node": self.workload.ranks_per_node,
            "probe": self.probe and asdict(self.probe),
            "given": self._prediction_json(advice.given),
            "refused": advice.refused,
            "advised": self._prediction_json(advice.advised),
            "suggestions": [asdict(each) | {"is_change": each.is_change} for each in advice.suggestions],
        }

    def _prediction_json(self, prediction: Prediction | None) -> dict[str, Any] | None:
        if prediction is None:
            return None
        values = asdict(prediction)
        values["bound"] |= {"seconds": prediction.bound.seconds, "limit": prediction.bound.limit}
        for name, epoch in (("first", prediction.first), ("later", prediction.later)):
            waiting = self.waiting_dollars(epoch)
            values[name] |= {"stall": epoch.stall, "accelerator_utilization": epoch.accelerator_utilization}
            values[name] |= {"dollars": self.dollars(epoch), "waiting_dollars": waiting}
        return values

    def as_text(self) -> list[str]:
        """Return the lines of the text output."""
        args, manifest, ranks = self.args, self.workload.manifest, self.args.ranks_per_node
        average = format_bytes(manifest.size_bytes / len(manifest))
        sample = format_bytes(self.workload.sample_bytes)
        need = format_bytes(ranks * args.gpu_rate * self.workload.sample_bytes)
        who, a_node = (", each", "") if ranks == 1 else (f" of {format_count(ranks, 'rank')}, each rank", " a node")
        rate = f"{args.gpu_rate:,.0f}" if args.gpu_rate >= 10 else f"{args.gpu_rate:.3g}"
        training = f"{format_count(args.nodes, 'node')}{who} {rate} samples/s in batches of {args.batch_size}"
        packed = f"{format_count(len(manifest), 'super-sample')} of {average}"
        return [
            f"{make_printable(args.url)}, version {manifest.version}",
            f"  {format_count(manifest.samples, 'sample')} of {sample} in {packed}",
            *_wrap(f"{training}: {need}/s{a_node}"),
            *_wrap(self._describe_bucket()),
            "",
            *self._prediction_lines(),
            "",
            *_bound_lines(self.advice),
            "",
            *(line for each in self.advice.suggestions for line in _suggestion_lines(each, args.url)),
        ]

    def _describe_bucket(self) -> str:
        """Describe the bucket, and whether the figures were given or measured."""
        probed, bucket = self.probe, self.workload.bucket
        limit, excess = bucket.requests_per_second, _describe_excess(bucket)
        limited = "" if limit == math.inf else f"; the bucket answers {limit:,.3g} requests/s, and {excess}"
        alone, together = map(format_bytes, (bucket.connection_bytes_per_second, self.workload.node_bytes_per_second))
        first_byte = _format_seconds(self.resources.median_seconds)
        rates = f"first byte {first_byte}, one connection {alone}/s, a node {together}/s"
        if probed is None:
            return f"as given: {rates}{limited}"
        took = (
            f"{format_count(probed.requests, 'request')} and {format_bytes(probed.read_bytes)} in "
            f"{_format_seconds(probed.seconds)}"
        )
        if probed.is_rate_assumed:
            return f"measured with {took}: {rates}; rates are assumed: the objects are too small to measure{limited}"
        more = "" if probed.is_saturated else " at least"
        return f"measured with {took}: {rates}{more} (with {format_count(probed.connections, 'connection')}){limited}"

    def _prediction_lines(self) -> list[str]:
        advice = self.advice
        columns = [("as it is", advice.given), ("advised", advice.advised)]
        if not any(each.is_change for each in advice.suggestions):
            columns = columns[:1]
        rows: list[list[str]] = [["predicted", *(name for name, _ in columns)]]
        facts: dict[str, Callable[[Prediction], str]] = {
            "time to first batch": lambda prediction: "{} to {}".format(
                *map(_format_seconds, prediction.first_batch_range_seconds)
            ),
            "first epoch": lambda prediction: (
                f"{_format_seconds(prediction.first.seconds)}, {prediction.first.stall:.1%} stalled"
            ),
            "later epochs": lambda prediction: (
                f"{_format_seconds(prediction.later.seconds)}, {prediction.later.stall:.1%} stalled"
            ),
            "accelerator utilization": lambda prediction: (
                f"{prediction.first.accelerator_utilization:.1%}, then {prediction.later.accelerator_utilization:.1%}"
            ),
            "requests, first epoch": lambda prediction: f"{prediction.first.requests:,.0f}",
            "requests, later epochs": lambda prediction: f"{prediction.later.requests:,.0f}",
            "bytes, first epoch": lambda prediction: format_bytes(prediction.first.read_bytes),
            "bytes, later epochs": lambda prediction: format_bytes(prediction.later.read_bytes),
            **(_CLUSTER_FACTS if self.workload.cluster is not None else {}),
            "bucket, first epoch": lambda prediction: format_dollars(self.dollars(prediction.first)),
            "bucket, later epochs": lambda prediction: format_dollars(self.dollars(prediction.later)),
            "waiting an epoch": lambda prediction: format_dollars(self.waiting_dollars(prediction.later) or 0.0),
        }
        if self.prices.region == "local":
            del facts["bucket, first epoch"], facts["bucket, later epochs"]
        if advice.advised and self.waiting_dollars(advice.advised.later) is None:
            del facts["waiting an epoch"]
        for name, fact in facts.items():
            rows.append(
                [name, *("cannot run" if prediction is None else fact(prediction) for _, prediction in columns)]
            )
        lines = table(rows).splitlines()
        return lines + (_wrap(advice.refused) if advice.refused else [])


def _describe_hits(prediction: Prediction) -> str:
    """Describe where the reads of later epochs hit: on a rank's own node, on other nodes, and not at all."""
    found = prediction.cluster
    assert found is not None  # noqa: S101 - shown with a cluster cache only
    own = found.held_share * (1 - found.remote_share)
    return f"{own:.1%}, {found.held_share - own:.1%}, {1 - found.held_share:.1%}"


def _describe_network(prediction: Prediction) -> str:
    """Describe the bytes between nodes, in the first epoch and in a later one."""
    found = prediction.cluster
    assert found is not None  # noqa: S101 - as above
    first, later = map(format_bytes, (found.first_network_bytes, found.later_network_bytes))
    return first if first == later else f"{first}, then {later}"


_CLUSTER_FACTS: Mapping[str, Callable[[Prediction], str]] = {
    "from own node, others, bucket": _describe_hits,
    "bytes an epoch between nodes": _describe_network,
}
"""Rows of the text output with a cluster cache: of later epochs, and of all of them."""


def _describe_excess(model: BucketModel) -> str:
    """Describe what a bucket does with requests above its rate."""
    return "queues requests above that" if model.max_queue_seconds == math.inf else "refuses requests above that"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _bound_lines(advice: Advice) -> list[str]:
    bound = (advice.given or advice.advised).bound
    return _wrap(
        f"no epoch can be shorter than {_format_seconds(bound.seconds)}, limited by {bound.limit}: compute "
        f"{_format_seconds(bound.compute_seconds)}, bandwidth {_format_seconds(bound.transfer_seconds)}, requests "
        f"{_format_seconds(bound.request_seconds)}"
        + (f", request rate {_format_seconds(bound.rate_seconds)}" if bound.rate_seconds else "")
        + (f", network {_format_seconds(bound.network_seconds)}" if bound.network_seconds else "")
    )


def _suggestion_lines(each: Suggestion, url: str) -> list[str]:
    change = f"{each.given} → {each.advised}" if each.is_change else each.given
    lines = _wrap(f"{each.name}: {change}; {each.reason}")
    if each.command:
        lines.append(f"      {each.command.replace('URL', make_printable(shlex.quote(url)))}")
    return lines


def _format_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
