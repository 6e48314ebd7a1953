"""Commands that read a data set: ``stoker info``, ``head`` and ``doctor``."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import Any

from stoker._base.sizes import format_bytes
from stoker._base.terminal import Style, styled
from stoker._dataset import Dataset
from stoker._diagnostics.doctor import DoctorConfig, diagnose
from stoker._diagnostics.machine import Finding, Level
from stoker._format.manifest import Manifest
from stoker._format.pack_shuffle import PackShuffle
from stoker._format.schema import Schema
from stoker._format.versions import list_versions, read_manifest
from stoker.cli.flags import add_dataset, add_json, add_store_options, open_store_from_args, positive, store_options
from stoker.cli.output import describe, format_count, json_text, json_value, make_printable, preview, table


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    add_json(parser)
    parser.set_defaults(example="stoker info s3://bucket/dataset")


async def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    async with open_store_from_args(args) as store:
        manifest = await read_manifest(store, args.at)
        versions = await list_versions(store)
    runs, start = [], 0
    for run in manifest.runs:
        rows = slice(start, start + run.rows)
        start += run.rows
        samples = int(manifest.rows.samples[rows].sum(dtype="i8"))
        size_bytes = int(manifest.rows.size_bytes[rows].sum(dtype="i8"))
        runs.append({"run": run.run, "super_samples": run.rows, "samples": samples, "size_bytes": size_bytes})
    facts = {
        "url": args.url,
        "dataset": manifest.dataset,
        "version": manifest.version,
        "versions": versions,
        "samples": manifest.samples,
        "super_samples": len(manifest),
        "size_bytes": manifest.size_bytes,
        "largest_bytes": manifest.largest_bytes,
        "strong_identities": manifest.rows.strong_identity_count,
        "shuffles": _count_permuted(manifest),
        "schema": json.loads(manifest.schema.to_json()),
        "runs": runs,
    }
    print(json.dumps(facts, indent=2) if args.json else _format_text(facts, manifest.schema))
    return 0


def _format_text(facts: dict[str, Any], schema: Schema) -> str:
    count, versions, size_bytes = facts["super_samples"], facts["versions"], facts["size_bytes"]
    average = format_bytes(size_bytes / max(1, count))
    largest = format_bytes(facts["largest_bytes"])
    others = f" (there are {', '.join(map(str, versions))})" if len(versions) > 1 else ""
    facts_rows = [
        ("data set", make_printable(facts["dataset"])),
        ("version", f"{facts['version']}{others}"),
        ("samples", f"{facts['samples']:,}"),
        ("super-samples", f"{count:,}: {average} on average, {largest} the largest"),
        ("size", format_bytes(size_bytes)),
        ("order", _describe_order(facts["shuffles"], facts["samples"])),
        ("identities", _describe_identities(facts["strong_identities"], count)),
    ]
    columns = [(name, describe(column)) for name, column in schema.items()]
    runs = [
        (
            run["run"],
            format_count(run["super_samples"], "super-sample"),
            format_count(run["samples"], "sample"),
            format_bytes(run["size_bytes"]),
        )
        for run in facts["runs"]
    ]
    return f"{facts['url']}\n{table(facts_rows)}\ncolumns\n{table(columns)}\npack runs\n{table(runs)}"


def _count_permuted(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the permutations that packs have made, each with its seed, its pack, and its number of samples."""
    samples: Counter[PackShuffle] = Counter()
    start = 0
    for run in manifest.runs:
        if shuffle := manifest.shuffles.get(run.run):
            samples[shuffle] += int(manifest.rows.samples[start : start + run.rows].sum(dtype="i8"))
        start += run.rows
    return [{"seed": each.seed, "pack": each.pack, "samples": count} for each, count in samples.items()]


def _describe_order(shuffles: list[dict[str, Any]], samples: int) -> str:
    if not shuffles:
        return "as packed"
    if len(shuffles) == 1 and shuffles[0]["samples"] == samples:
        return f"permuted with seed {shuffles[0]['seed']}"
    parts = [f"{format_count(each['samples'], 'sample')} with seed {each['seed']}" for each in shuffles]
    rest = samples - sum(each["samples"] for each in shuffles)
    others = [f"{format_count(rest, 'sample')} as packed"] if rest else []
    return f"permuted in parts: {', '.join([*parts, *others])}"


def _describe_identities(strong: int, count: int) -> str:
    if strong == count:
        return "SHA-256"
    return f"SHA-256 of {strong:,} super-samples, a checksum of the others" if strong else "a checksum"


def configure_head(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("-n", type=positive, default=5, metavar="N", help="number of samples (default: 5)")
    add_json(parser)
    parser.set_defaults(example="stoker head s3://bucket/dataset -n 3")


def run_head(args: Namespace) -> int:
    """Run the command and return its exit code."""
    with Dataset(args.url, version=args.at, options=store_options(args, args.url)) as dataset:
        if args.json:
            schema = dataset.schema
            samples = [
                {name: json_value(schema[name], value) for name, value in sample.items()}
                for sample in islice(dataset, args.n)
            ]
            print(json_text({"url": args.url, "version": dataset.manifest.version, "samples": samples}))
            return 0
        for number, sample in enumerate(islice(dataset, args.n)):
            rows = [(name, preview(dataset.schema[name], value)) for name, value in sample.items()]
            print(f"sample {number}\n{table(rows)}")
    return 0


_LINE_WIDTH = 80
_LEVEL_LABELS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warn", Level.PROBLEM: "FAIL"}
_LEVEL_STYLES: dict[Level, Style] = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "error"}
_LABEL_WIDTH, _NAME_WIDTH = 6, 19


def configure_doctor(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="the data set: a path, or an s3://, gs:// or stoker+https:// URL")
    parser.add_argument("--write", action="store_true", help="also write and delete a small object below URL/doctor/")
    add_json(parser)
    add_store_options(parser)
    parser.set_defaults(example="stoker doctor s3://bucket/dataset --write")


async def run_doctor(args: Namespace) -> int:
    """Run the command and return its exit code."""
    findings, commands = list[Finding](), set[str]()

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not args.json:
            print("\n".join(_format_finding(finding, args.url, commands)), flush=True)

    await diagnose(DoctorConfig(url=args.url, options=store_options(args, args.url), write=args.write), report)
    problems, warnings = (sum(each.level is level for each in findings) for level in (Level.PROBLEM, Level.WARNING))
    if args.json:
        print(json_text({"url": args.url, "ok": not problems, "findings": [asdict(each) for each in findings]}))
    else:
        summary = f"{format_count(problems, 'problem')}, {format_count(warnings, 'warning')}"
        print(summary if problems + warnings else "all is well")
    return 1 if problems else 0


def _format_finding(finding: Finding, url: str, commands: set[str]) -> list[str]:
    """Return the lines of a finding; leave out its command if ``commands`` has it already, else add it there."""
    margin = " " * (_LABEL_WIDTH + _NAME_WIDTH)
    lines = _wrap_text(
        finding.text, f"{_LEVEL_LABELS[finding.level]:<{_LABEL_WIDTH}}{finding.check:<{_NAME_WIDTH}}", margin
    )
    if finding.level in _LEVEL_STYLES:
        label, rest = lines[0][:_LABEL_WIDTH], lines[0][_LABEL_WIDTH:]
        lines[0] = styled(label, _LEVEL_STYLES[finding.level], sys.stdout) + rest
    if finding.advice:
        lines += _wrap_text(finding.advice, f"{margin}→ ", f"{margin}  ")
    if finding.command not in {"", *commands}:
        commands.add(finding.command)
        lines.append(f"{margin}  {finding.command.replace('URL', make_printable(shlex.quote(url)))}")
    return lines


def _wrap_text(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        make_printable(text), _LINE_WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
