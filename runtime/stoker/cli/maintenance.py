"""Commands that maintain a data set: ``stoker verify``, ``compact``, ``gc``, ``rebuild-manifest`` and ``rm``."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from stoker._base.progress import ProgressReporter, WorkAmount
from stoker._base.retry import RetryingStore
from stoker._base.sizes import format_bytes
from stoker._format.manifest import version_key
from stoker._format.versions import read_manifest
from stoker._maintenance.compaction import compact
from stoker._maintenance.garbage import (
    GarbageReport,
    RemovalPlan,
    UnfinishedRun,
    collect_garbage,
    plan_removal,
    remove_dataset,
)
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.catalog import BucketCatalog
from stoker._stores.location import parse_url
from stoker.abc import Store
from stoker.cli.flags import (
    add_dataset,
    add_json,
    add_store_options,
    add_written_dataset,
    open_store_from_args,
    positive,
    target_size,
)
from stoker.cli.output import RequestCosts, format_bad_object, format_count, json_text, make_printable, quote_start
from stoker.errors import ConfigError


def configure_verify(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("--deep", action="store_true", help="also check the checksum of every value")
    at_once = "concurrent reads of super-samples (default: 4)"
    parser.add_argument("--concurrency", type=positive, default=4, metavar="N", help=at_once)
    parser.add_argument("--quiet", action="store_true", help="list bad super-samples only")
    add_json(parser)
    parser.set_defaults(example="stoker verify s3://bucket/dataset --deep")


async def run_verify(args: Namespace) -> int:
    """Run the command and return its exit code."""
    bill = RequestCosts()
    async with open_store_from_args(args) as inner:
        store = bill.add_store(inner)
        manifest = await read_manifest(store, args.at)
        total = WorkAmount(count=len(manifest), size_bytes=manifest.size_bytes)
        async with ProgressReporter(
            "verifying", "super-samples", total, sys.stderr, quiet=args.quiet or args.json
        ) as progress:
            bad = await verify(
                store,
                manifest,
                deep=args.deep,
                concurrency=args.concurrency,
                on_object=lambda ref, _: progress.add(ref.size_bytes),
            )
    if args.json:
        figures = {"url": args.url, "version": manifest.version, "super_samples": total.count}
        figures |= {"size_bytes": total.size_bytes, "bad": [asdict(item) for item in bad]}
        print(json_text({**figures, **bill.to_dict()}))
        return 1 if bad else 0
    for item in bad:
        print(make_printable(format_bad_object(item)))
    if not args.quiet:
        verdict = f"{len(bad):,} of them bad" if bad else "all of them good"
        objects_text = f"{format_count(len(manifest), 'super-sample')} of version {manifest.version}"
        print(
            f"verified {objects_text}, {format_bytes(manifest.size_bytes)}: {verdict}\n{bill.summary()}",
            file=sys.stderr,
        )
    return 1 if bad else 0


def configure_compact(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    target_help = "target size; super-samples below half of it are merged (default: 8MiB)"
    parser.add_argument("--super-sample-bytes", type=target_size, default=8 << 20, metavar="SIZE", help=target_help)
    add_json(parser)
    parser.set_defaults(example="stoker compact s3://bucket/dataset")
    add_store_options(parser)


async def run_compact(args: Namespace) -> int:
    """Run the command and return its exit code."""
    bill = RequestCosts()
    async with open_store_from_args(args) as inner:
        store, size_bytes = bill.add_store(inner), args.super_sample_bytes
        catalog = BucketCatalog(store)
        done = await compact(RetryingStore(store), catalog, now_seconds=time.time(), super_sample_bytes=size_bytes)
    version, left = done.manifest.version, done.left_objects
    if args.json:
        figures = {"url": args.url, "version": version, "objects_before": done.objects_before}
        figures |= {"objects_after": done.objects_after, "left_objects": left}
        print(json_text({**figures, **bill.to_dict()}))
        return 0
    if done.objects_before:
        print(
            f"{format_count(done.objects_before, 'super-sample')} became {done.objects_after:,}: version "
            f"{version}; when no training reads an older version, delete the old ones with: "
            "stoker gc --keep-versions 1 --delete"
        )
        if left:
            print(f"{format_count(left, 'small super-sample')} left: run the command again")
    else:
        print(f"nothing to gain in version {version}")
    print(bill.summary(), file=sys.stderr)
    return 0


def configure_gc(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument("--delete", action="store_true", help="delete the listed objects (default: only list them)")
    newest = "keep only the newest N versions (default: all); no training may read an older one"
    parser.add_argument("--keep-versions", type=positive, metavar="N", help=newest)
    run = "also delete this unfinished run or job, by the id that is listed; may be repeated"
    parser.add_argument("--abandoned", action="append", default=[], metavar="ID", help=run)
    add_json(parser)
    parser.set_defaults(example="stoker gc s3://bucket/dataset --keep-versions 1 --delete")
    add_store_options(parser)


async def run_gc(args: Namespace) -> int:
    """Run the command and return its exit code."""
    bill = RequestCosts()
    async with open_store_from_args(args) as inner:
        store, keep = bill.add_store(inner), args.keep_versions
        report = await collect_garbage(store, delete=args.delete, keep_versions=keep, abandoned=args.abandoned)
    if not args.json:
        _show_garbage(report)
        print(bill.summary(), file=sys.stderr)
        return 0
    figures = {
        "url": args.url,
        "is_deleted": report.is_deleted,
        "super_samples": [info.key for info in report.objects],
        "size_bytes": report.size_bytes,
        "records": report.records,
        "versions": report.versions,
        "uploads": [upload.key for upload in report.uploads],
        "unfinished": {run: each.objects for run, each in report.unfinished.items()},
    }
    print(json_text({**figures, **bill.to_dict()}))
    return 0


def _show_garbage(report: GarbageReport) -> None:
    for info in report.objects:
        print(f"{info.key}  {format_bytes(info.size_bytes)}")
    for key in (*report.records, *map(version_key, report.versions)):
        print(make_printable(key))
    for upload in report.uploads:
        print(f"unfinished upload of {make_printable(upload.key)}, begun {upload.begun:%Y-%m-%d %H:%M} UTC")
    count = len(report.objects) + len(report.records) + len(report.versions) + len(report.uploads)
    verb = "deleted" if report.is_deleted else "could be deleted with --delete"
    summary = f"{format_count(count, 'object')} {verb}, {format_bytes(report.size_bytes)} of super-samples"
    print(summary if count else "no garbage")
    for line in _describe_unfinished(report.unfinished.values()):
        print(f"left alone: {line}")


def _describe_unfinished(unfinished: Iterable[UnfinishedRun]) -> Iterator[str]:
    """Yield a line for each protected run and job, and one for all other runs of functions: its content and remedy."""
    jobs: dict[str, list[int]] = defaultdict(list)
    for each in unfinished:
        record, objects = each.record, format_count(each.objects, "super-sample")
        give_up = f"give it up with --abandoned {each.run}"
        if record is None:
            yield f"run {each.run}, whose record is damaged, {objects}"
        elif each.is_refused:
            remedy = f"no commit adds it: it has other columns, or is of another data set; {give_up}"
            yield f"run {each.run} of {quote_start(record.source)}, {objects}; {remedy}"
        elif record.mode == "deferred":
            jobs[record.job].append(each.objects)
        else:
            pack_text = f"the unfinished pack {each.run} of {quote_start(record.source)}, {objects}"
            yield f"{pack_text}; pack the same again to resume it, or {give_up}"
    for job, counts in sorted(jobs.items(), reverse=True):
        pack_text = f"{format_count(len(counts), 'run')} {f'of job {job}' if job else 'of functions'}"
        remedy = "functions finish and commit them"
        if job:
            remedy = f"the same stoker pack --on finishes and commits it, or give it up with --abandoned {job}"
        yield f"{pack_text}, {format_count(sum(counts), 'super-sample')}; {remedy}"


def configure_rebuild(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    orphans = "also add super-samples that no manifest and no finished pack lists, after reading them completely"
    parser.add_argument("--adopt", action="store_true", help=orphans)
    verify_help = "read every super-sample completely and leave out damaged ones (default: read their heads only)"
    parser.add_argument("--verify", action="store_true", help=verify_help)
    add_json(parser)
    add_store_options(parser)
    parser.set_defaults(example="stoker rebuild-manifest s3://bucket/dataset --verify")


async def run_rebuild(args: Namespace) -> int:
    """Run the command and return its exit code."""
    async with open_store_from_args(args) as store:
        report = await rebuild_manifest(store, adopt=args.adopt, verify=args.verify)
    manifest = report.manifest
    is_complete = not (report.lost or report.refused or report.gaps or report.repeats)
    if args.json:
        figures = {"url": args.url, "version": manifest.version, "is_new": report.is_new}
        figures |= {"super_samples": len(manifest), "samples": manifest.samples}
        figures |= {"adopted": report.adopted, "orphans": report.orphans}
        for name in ("lost", "refused", "gaps", "repeats"):
            figures[name] = [asdict(each) for each in getattr(report, name)]
        print(json_text(figures))
        return 0 if is_complete else 1
    verb = "made" if report.is_new else "nothing is missing from"
    contents = f"{format_count(len(manifest), 'super-sample')}, {format_count(manifest.samples, 'sample')}"
    print(f"{verb} version {manifest.version}: {contents}")
    _print_list("lost", map(format_bad_object, report.lost))
    _print_list("adopted", report.adopted)
    _print_list("not adopted", map(format_bad_object, report.refused))
    if not args.adopt:
        _print_list("in no version and no finished pack (--adopt takes them in)", report.orphans)
    _print_list("missing", map(format_bad_object, report.gaps))
    _print_list("perhaps twice", map(format_bad_object, report.repeats))
    return 0 if is_complete else 1


def _print_list(title: str, lines: Iterable[str]) -> None:
    if shown_lines := [f"  {make_printable(line)}" for line in lines]:
        print(f"{title}: {len(shown_lines):,}", *shown_lines, sep="\n")


_MAX_SHOWN_OTHERS = 5


def configure_rm(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--quiet", action="store_true", help="show no progress and no summary")
    add_json(parser)
    add_store_options(parser)
    parser.set_defaults(example="stoker rm s3://bucket/dataset")
    parser.set_defaults(when_interrupted="interrupted; run the same command again to delete the rest")


async def run_rm(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if not args.yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("stoker rm asks for confirmation, but there is no terminal; use --yes to delete without it")
    if links := [folder for folder in _own_folders(args.url) if folder.is_symlink()]:  # may lead to other data
        raise ConfigError(
            f"{make_printable(str(links[0]))} is a link to another folder, whose files would be deleted; remove "
            "the link first, or name the data set that it leads to"
        )
    bill = RequestCosts()
    async with open_store_from_args(args) as inner:
        store = bill.add_store(inner)
        removal = await plan_removal(store)
        description = _describe_removal(store, removal)
        if not args.yes and not _is_confirmed(description):
            print("nothing was deleted", file=sys.stderr)
            return 1
        total = WorkAmount(count=len(removal.objects), size_bytes=removal.size_bytes)
        is_quiet = args.quiet or args.json
        async with ProgressReporter("deleting", "objects", total, sys.stderr, quiet=is_quiet) as progress:
            await remove_dataset(store, removal, lambda info: progress.add(info.size_bytes))
    _remove_empty_folders(args.url)
    if args.json:
        figures = {"url": args.url, "deleted": total.count, "size_bytes": total.size_bytes}
        print(json_text({**figures, "others": [info.key for info in removal.others], **bill.to_dict()}))
    elif not args.quiet:
        print(f"deleted {description}; {bill.summary()}", file=sys.stderr)
        if removal.others:
            examples = ", ".join(make_printable(info.key) for info in removal.others[:_MAX_SHOWN_OTHERS])
            print(f"left alone, since stoker did not make them: {len(removal.others):,}: {examples}", file=sys.stderr)
    return 0


def _describe_removal(store: Store, removal: RemovalPlan) -> str:
    size = f"{format_count(len(removal.objects), 'object')}, {format_bytes(removal.size_bytes)}"
    manifest, url = removal.manifest, make_printable(store.url)
    if manifest is None:
        return f"what is left of a data set at {url} ({size})"
    return f"the data set at {url}: {format_count(manifest.samples, 'sample')}, version {manifest.version} ({size})"


def _is_confirmed(description: str) -> bool:
    try:
        return input(f"delete {description}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _own_folders(url: str) -> list[Path]:
    """Return the folders of a local data set, and links to folders in it, outer ones first."""
    location = parse_url(url)
    if location.scheme != "file":
        return []
    own = [Path(location.bucket) / name for name in ("data", "epochs", "manifests", "packs")]
    return [path for folder in own for path in (folder, *sorted(folder.rglob("*"))) if path.is_dir()]


def _remove_empty_folders(url: str) -> None:
    """Remove those local folders of the data set that are empty."""
    if folders := _own_folders(url):
        folders.insert(0, folders[0].parent)
    for folder in reversed(folders):
        with suppress(OSError):  # it is not empty
            folder.rmdir()
