"""``stoker gc``: list, and with ``--delete`` delete, what no version of a data set needs."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator

from stoker._base.sizes import format_bytes
from stoker._format.manifest import version_key
from stoker._maintenance import GarbageReport, Unfinished, gc
from stoker.cli.flags import add_store_options, add_written_dataset, opened, positive
from stoker.cli.output import RequestBill, counted, json_text, printable, shortened

__all__ = ["configure", "run"]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    parser.add_argument(
        "--keep-versions",
        type=positive,
        metavar="N",
        help="only the newest N versions are needed (default: all); no training may run on an older one",
    )
    parser.add_argument(
        "--abandoned",
        action="append",
        default=[],
        metavar="ID",
        help="an unfinished run, or a whole job, that nobody will finish, by the id that is listed; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    bill = RequestBill()
    report = asyncio.run(_collect(args, bill))
    if args.json:
        print(json_text({**_summary(args, report), **bill.to_dict()}))
    else:
        _show(report)
        print(bill.line(), file=sys.stderr)
    return 0


def _summary(args: Namespace, report: GarbageReport) -> dict[str, object]:
    return {
        "url": args.url,
        "is_deleted": report.is_deleted,
        "super_samples": [info.key for info in report.objects],
        "size_bytes": report.size_bytes,
        "records": report.records,
        "versions": report.versions,
        "unfinished": {run: each.objects for run, each in report.unfinished.items()},
    }


def _show(report: GarbageReport) -> None:
    for info in report.objects:
        print(f"{info.key}  {format_bytes(info.size_bytes)}")
    for key in (*report.records, *map(version_key, report.versions)):
        print(printable(key))
    count = len(report.objects) + len(report.records) + len(report.versions)
    verb = "deleted" if report.is_deleted else "could be deleted with --delete"
    print(
        f"{counted(count, 'object')} {verb}, {format_bytes(report.size_bytes)} of super-samples"
        if count
        else "no garbage"
    )
    for line in _left_alone(report.unfinished.values()):
        print(f"left alone: {line}")


def _left_alone(unfinished: Iterable[Unfinished]) -> Iterator[str]:
    """Yield what is protected, and what becomes of it: a job in one line, and all that functions take in in another."""
    jobs: dict[str, list[int]] = defaultdict(list)
    for each in unfinished:
        record = each.record
        if record is None:
            yield f"run {each.run}, whose record is damaged, {counted(each.objects, 'super-sample')}"
        elif each.is_refused:
            remedy = f"it has other columns, or is of another data set; give it up with --abandoned {each.run}"
            found = f"run {each.run} of {shortened(record.source)}, {counted(each.objects, 'super-sample')}"
            yield f"{found}; no commit adds it: {remedy}"
        elif record.mode == "deferred":
            jobs[record.job].append(each.objects)
        else:
            found = f"the unfinished pack {each.run} of {shortened(record.source)}"
            remedy = f"pack the same again to resume it, or give it up with --abandoned {each.run}"
            yield f"{found}, {counted(each.objects, 'super-sample')}; {remedy}"
    for job, objects in sorted(jobs.items(), reverse=True):
        found = f"{counted(len(objects), 'run')} {f'of job {job}' if job else 'of functions'}"
        remedy = (
            f"the same stoker pack --on finishes and commits it, or give it up with --abandoned {job}"
            if job
            else "functions finish and commit them"
        )
        yield f"{found}, {counted(sum(objects), 'super-sample')}; {remedy}"


async def _collect(args: Namespace, bill: RequestBill) -> GarbageReport:
    async with opened(args) as store:
        return await gc(
            bill.metered(store), delete=args.delete, keep_versions=args.keep_versions, abandoned=args.abandoned
        )
