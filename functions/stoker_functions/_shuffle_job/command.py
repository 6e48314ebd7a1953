"""``stoker shuffle``: writes epochs of shuffle ``full`` as separate objects, ahead of the training that reads them."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from stoker._base.meter import Operation, PriceKey
from stoker._base.progress import ProgressReporter, WorkAmount, format_seconds
from stoker._base.sizes import format_bytes
from stoker._cost.prices import Prices, StorePrices
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._format.display import to_plain
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._order.epoch_layout import MAX_EPOCH, EpochLayout
from stoker._pack.stored_samples import usable_bytes
from stoker._stores.location import parse_url
from stoker._stores.object_store import ObjectStore, price_key, with_meter
from stoker.abc import Answer, Executor, Store
from stoker.cli import flags
from stoker.cli.output import format_count, json_text, say, table
from stoker.fanout import Driver, FanoutConfig, Task
from stoker_functions._shuffle_job.plan import EpochPlan, PlanConfig, choose_plan, plan_ways
from stoker_functions._shuffle_job.work import ShuffleTask, Way, perform

_EPOCHS = re.compile(r"(\d{1,8})(?:\.\.(\d{1,8}))?", re.ASCII)
_DEFAULT_BYTES = 1 << 30
_TASK_SECONDS = 900.0  # Lambda's maximum
_DAYS_A_MONTH = 30


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    flags.add_written_dataset(parser)
    flags.add_version(parser)
    flags.add_store_options(parser)
    seed = flags.whole_number_to((1 << 64) - 1)
    parser.add_argument("--seed", type=seed, required=True, metavar="N", help="seed of the training")
    epochs = "epoch or range of epochs to write, from 0: 3, or 3..10"
    names = ("--epoch", "--epochs")
    parser.add_argument(*names, dest="epochs", type=_epochs, required=True, metavar="N[..M]", help=epochs)
    lanes = "lanes of the training: its number of ranks, unless it sets lanes= (default: 1)"
    parser.add_argument("--lanes", type=flags.positive, default=1, metavar="N", help=lanes)
    parser.add_argument("--plan", action="store_true", help="only show the cost of each way, and exit")
    parser.add_argument("--way", choices=get_args(Way), help="how samples are read (default: the cheapest that fits)")
    slices = "minimum number of slices of an epoch (default: 1)"
    parser.add_argument("--slices", type=flags.positive, default=1, metavar="N", help=slices)
    keep = "keep N epochs before the first one, and delete older ones (default: delete none)"
    parser.add_argument("--keep", type=flags.whole_number_to(MAX_EPOCH), metavar="N", help=keep)
    memory = "memory of this process or of a function, which must hold a slice (default: 1GiB)"
    parser.add_argument("--memory", type=flags.size, default=_DEFAULT_BYTES, metavar="SIZE", help=memory)
    parser.add_argument("--quiet", action="store_true", help="show no progress and no summary")
    flags.add_json(parser)
    parser.set_defaults(example="stoker shuffle s3://bucket/dataset --seed 7 --epochs 0..9 --lanes 8")
    group = parser.add_argument_group("shuffling in many functions at once", "see docs/fan-out.md")
    flags.add_function_options(group.add_argument, "shuffle")
    parser.set_defaults(when_interrupted="interrupted; written objects stay: run the same command again to go on")


def _epochs(text: str) -> range:
    match = _EPOCHS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if last < first:
        raise ArgumentTypeError(f"{text!r} is not an epoch from 0 to {MAX_EPOCH}, or a range of them as 3..10")
    return range(first, last + 1)


async def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    async with flags.open_store_from_args(args) as opened:
        store = with_meter(opened)
        manifest = await read_manifest(store, args.at)
        executor = _executor(args, store)
        config = _plan_config(args, executor, price_key(store))
        plans = plan_ways(manifest, config)
        if args.plan:
            text = json_text([asdict(each) for each in plans]) if args.json else None
            print(text or _format_plans(args, plans, manifest, config.store))
            return 0
        plan = choose_plan([plan for plan in plans if args.way in (None, plan.way)])
        async with executor:
            making = _EpochMaker(args, plan, store, executor)
            for epoch in args.epochs:
                await making.make(EpochLayout(manifest, seed=args.seed, lanes=args.lanes, epoch=epoch))
        making.report()
    return 0


def _executor(args: Namespace, store: ObjectStore) -> Executor:
    flags.check_function_options(args)
    if args.on:
        return flags.create_executor(args, parse_url(args.url))
    return InProcess(store, memory_bytes=usable_bytes(args.memory))


def _plan_config(args: Namespace, executor: Executor, key: PriceKey) -> PlanConfig:
    prices = Prices.load()
    return PlanConfig(
        lanes=args.lanes,
        store=prices.store(key),
        slices=args.slices,
        memory_bytes=usable_bytes(args.memory),
        task_seconds=math.inf if executor.platform is None else _TASK_SECONDS,
        concurrency=executor.concurrency,
        prices=None if executor.platform is None else prices.functions[executor.platform],
        configured_bytes=args.memory,
        vcpus=executor.vcpus("shuffle"),
    )


class _EpochMaker:
    """Makes the epochs of the command, one after the other."""

    def __init__(self, args: Namespace, plan: EpochPlan, store: ObjectStore, executor: Executor) -> None:
        self._args, self._plan, self._store = args, plan, store
        self._progress: ProgressReporter | None = None
        self._epochs = list[dict[str, Any]]()
        # No second copies of late tasks in this process: they would only slow the first one down.
        patience = (
            FanoutConfig(late_fraction=0.0, late_burst=0) if not args.on else FanoutConfig(max_concurrency=args.workers)
        )
        self._driver = Driver(executor, patience, on_progress=self._show)

    async def make(self, layout: EpochLayout) -> None:
        """Make one epoch, unless it exists, and delete those that are older than ``--keep`` allows."""
        args = self._args
        phases = self._plan.phases(
            dataset=flags.url_for_functions(parse_url(args.url)),
            version=layout.manifest.version,
            seed=args.seed,
            epoch=layout.epoch,
            lanes=args.lanes,
            keep=MAX_EPOCH if args.keep is None else min(args.keep + layout.epoch - args.epochs.start, MAX_EPOCH),
        )
        is_there = await read_epoch(self._store, layout) is not None
        if is_there:
            phases = phases[-1:]
        results: list[Mapping[str, Any]] = []
        for tasks in phases:
            results = await self._run_tasks(tasks, layout)
        url = f"{self._store.url}/{layout.folder.rstrip('/')}"
        deleted = [epoch for result in results for epoch in result.get("deleted_epochs", ())]
        outcome = {"epoch": layout.epoch, "url": url, "is_new": not is_there, "deleted_epochs": deleted}
        self._epochs.append(outcome)
        if args.json:
            return
        say(args, f"epoch {layout.epoch} is at {url}{' (it was there already)' if is_there else ''}")
        if deleted:
            names = ", ".join(map(str, deleted))
            say(args, f"deleted {'epoch' if len(deleted) == 1 else 'epochs'} {names} (--keep {args.keep})")

    async def _run_tasks(self, tasks: list[ShuffleTask], layout: EpochLayout) -> list[Mapping[str, Any]]:
        verb = {"scatter": "scattering", "slice": "writing", "commit": "committing"}[tasks[0].step]
        total = WorkAmount(count=len(tasks), size_bytes=layout.manifest.size_bytes)
        named = [
            Task(
                name=f"{task.step} {task.part} of epoch {task.epoch}",
                function="shuffle",
                event=task.to_event(),
                size_bytes=total.size_bytes // len(tasks),
            )
            for task in tasks
        ]
        async with ProgressReporter(
            f"epoch {layout.epoch}: {verb}", "parts", total, sys.stderr, quiet=self._args.quiet or self._args.json
        ) as progress:
            self._progress = progress
            return await self._driver.run(named)

    def _show(self, done: WorkAmount) -> None:
        if self._progress is not None:
            self._progress.update(done)

    def report(self) -> None:
        """Print the summary: time, requests, bytes and dollars."""
        lines, reading = self._driver.report.lines(), self._store.meter.snapshot()
        if self._args.json:
            counts = {str(operation): count for operation, count in reading.requests.items() if count}
            cost = {"requests": counts, "dollars": Prices.load().dollars(reading)}
            print(json_text({"epochs": self._epochs, "fan_out": to_plain(self._driver.report), **cost}))
            return
        if self._args.on:
            say(self._args, *lines)
            return
        gets, puts = reading.requests[Operation.GET], reading.requests[Operation.PUT]
        say(
            self._args,
            *lines[:-1],  # the last line is about functions
            f"{format_count(gets, 'GET')}, {format_bytes(reading.read_bytes)} read; {format_count(puts, 'PUT')}, "
            f"{format_bytes(reading.written_bytes)} written; ${Prices.load().dollars(reading):.6f} for them",
        )


def _format_plans(args: Namespace, plans: Sequence[EpochPlan], manifest: Manifest, store: StorePrices) -> str:
    """Return a table of the cost of each way, as lines."""
    rows = [("way", "slices", "scatters", "GETs", "PUTs", "read", "written", "bucket", "functions", "time", "")]
    best = min((plan for plan in plans if not plan.problem), key=lambda plan: plan.rank, default=None)
    rows += [
        (
            plan.way,
            f"{plan.slices:,}",
            f"{plan.scatters:,}",
            f"{plan.get_requests:,}",
            f"{plan.put_requests:,}",
            format_bytes(plan.read_bytes),
            format_bytes(plan.written_bytes),
            f"${plan.store_dollars:.6f}",
            f"${plan.function_dollars:.6f}",
            format_seconds(plan.seconds),
            plan.problem or ("chosen" if plan is best else ""),
        )
        for plan in plans
    ]
    a_day = store.storage_dollars(manifest.size_bytes, 1 / _DAYS_A_MONTH)
    summary = (
        f"{format_count(manifest.samples, 'sample')}, {format_bytes(manifest.size_bytes)}, in "
        f"{format_count(args.lanes, 'lane')}"
    )
    return f"an epoch of {summary}\n{table(rows)}\nan epoch that is kept for a day costs ${a_day:.6f}"


class InProcess(Executor):
    """Runs the function ``shuffle`` in this process.

    Args:
        store: store of the data set, which the caller closes.
        memory_bytes: memory that a task may use; one task runs at a time, with many concurrent requests.
    """

    name = "this process"
    concurrency = 1
    sees_files = True

    def __init__(self, store: Store, *, memory_bytes: int) -> None:
        self._store = store
        self._memory_bytes = memory_bytes

    async def __aenter__(self) -> InProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: each call ends with its caller."""

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Execute a task.

        Raises:
            StokerError: the task failed.
        """
        started = asyncio.get_running_loop().time()
        result = await perform(self._store, ShuffleTask.from_event(event), memory_bytes=self._memory_bytes)
        seconds = asyncio.get_running_loop().time() - started
        return Answer(result=result, billed_seconds=seconds, memory_bytes=self._memory_bytes, is_cold=None)
