"""``stoker info`` and ``stoker head``: what a data set is, and the first of its samples."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from itertools import islice
from typing import Any

from stoker._base.sizes import format_bytes
from stoker._dataset import Dataset
from stoker._format.manifest import Manifest
from stoker._format.versions import list_versions, read_manifest
from stoker.cli.flags import add_dataset, opened, positive, store_options
from stoker.cli.output import counted, describe, preview, printable, table

__all__ = ["configure", "configure_head", "run", "run_head"]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    manifest, versions = asyncio.run(_read(args))
    if args.json:
        print(json.dumps({"url": args.url, **_as_json(manifest, versions)}, indent=2))
    else:
        print(_as_text(args.url, manifest, versions))
    return 0


async def _read(args: Namespace) -> tuple[Manifest, list[int]]:
    async with opened(args) as store:
        return await read_manifest(store, args.at), await list_versions(store)


def _runs(manifest: Manifest) -> list[dict[str, Any]]:
    runs, start = [], 0
    for run in manifest.runs:
        rows = slice(start, start + run.rows)
        start += run.rows
        runs.append(
            {
                "run": run.run,
                "super_samples": run.rows,
                "samples": int(manifest.rows.samples[rows].sum(dtype="i8")),
                "size_bytes": int(manifest.rows.size_bytes[rows].sum(dtype="i8")),
            }
        )
    return runs


def _as_json(manifest: Manifest, versions: list[int]) -> dict[str, Any]:
    return {
        "dataset": manifest.dataset,
        "version": manifest.version,
        "versions": versions,
        "samples": manifest.samples,
        "super_samples": len(manifest),
        "size_bytes": manifest.size_bytes,
        "largest_bytes": manifest.largest_bytes,
        "schema": json.loads(manifest.schema.to_json()),
        "runs": _runs(manifest),
    }


def _as_text(url: str, manifest: Manifest, versions: list[int]) -> str:
    average = format_bytes(manifest.size_bytes / max(1, len(manifest)))
    largest = format_bytes(manifest.largest_bytes)
    facts = [
        ("data set", printable(manifest.dataset)),
        (
            "version",
            f"{manifest.version} (there are {', '.join(map(str, versions))})"
            if len(versions) > 1
            else str(manifest.version),
        ),
        ("samples", f"{manifest.samples:,}"),
        ("super-samples", f"{len(manifest):,}: {average} on average, {largest} the largest"),
        ("size", format_bytes(manifest.size_bytes)),
    ]
    columns = [(name, describe(column)) for name, column in manifest.schema.items()]
    runs = [
        (
            run["run"],
            counted(run["super_samples"], "super-sample"),
            counted(run["samples"], "sample"),
            format_bytes(run["size_bytes"]),
        )
        for run in _runs(manifest)
    ]
    return f"{url}\n{table(facts)}\ncolumns\n{table(columns)}\npack runs\n{table(runs)}"


def configure_head(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("-n", type=positive, default=5, metavar="N", help="how many samples (default: 5)")


def run_head(args: Namespace) -> int:
    """Run the command and return its exit code."""
    with Dataset(args.url, version=args.at, options=store_options(args, args.url)) as dataset:
        for number, sample in enumerate(islice(dataset, args.n)):
            rows = [(name, preview(dataset.schema[name], value)) for name, value in sample.items()]
            print(f"sample {number}\n{table(rows)}")
    return 0
