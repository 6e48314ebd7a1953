"""``stoker doctor``: what is wrong between here and a data set, and what to do about it."""

from __future__ import annotations

import asyncio
import shlex
import textwrap
from argparse import ArgumentParser, Namespace
from contextlib import aclosing
from dataclasses import asdict

from stoker._diagnostics.doctor import Examination, examine
from stoker._diagnostics.machine import Finding, Level
from stoker.cli.flags import add_store_options, store_options
from stoker.cli.output import counted, json_text, printable

__all__ = ["configure", "run"]

_WIDTH = 80
_SIGNS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "warn", Level.PROBLEM: "FAIL"}
_SIGN_WIDTH, _NAME_WIDTH = 6, 19


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="of the data set: a path, or an s3://, gs:// or stoker+https:// URL")
    parser.add_argument("--write", action="store_true", help="also write, and delete, a small object below URL/doctor/")
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    found = asyncio.run(_examine(args))
    problems = sum(each.level is Level.PROBLEM for each in found)
    if args.json:
        print(json_text({"url": args.url, "ok": not problems, "findings": [asdict(each) for each in found]}))
    else:
        warnings = sum(each.level is Level.WARNING for each in found)
        print(
            f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}" if problems + warnings else "all is well"
        )
    return 1 if problems else 0


async def _examine(args: Namespace) -> list[Finding]:
    what = Examination(url=args.url, options=store_options(args, args.url), write=args.write)
    found, commands = [], set[str]()
    async with aclosing(examine(what)) as findings:
        async for finding in findings:
            found.append(finding)
            if not args.json:
                print("\n".join(_shown(finding, args.url, commands)), flush=True)
    return found


def _shown(finding: Finding, url: str, commands: set[str]) -> list[str]:
    """Return a finding as lines; a command that is among those shown is not shown again."""
    margin = " " * (_SIGN_WIDTH + _NAME_WIDTH)
    lines = _wrapped(finding.text, f"{_SIGNS[finding.level]:<{_SIGN_WIDTH}}{finding.check:<{_NAME_WIDTH}}", margin)
    if finding.advice:
        lines += _wrapped(finding.advice, f"{margin}→ ", f"{margin}  ")
    if finding.command not in {"", *commands}:
        commands.add(finding.command)
        lines.append(f"{margin}  {finding.command.replace('URL', printable(shlex.quote(url)))}")
    return lines


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
