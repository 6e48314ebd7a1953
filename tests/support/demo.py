"""``stoker demo`` as a child process: start it, read its output, and find its descendants."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["cells", "demo", "set_misleading_environment", "read_until", "process_parents", "descendants_of"]


def set_misleading_environment(environment: pytest.MonkeyPatch, folder: Path) -> None:
    """Set a folder as TMPDIR and HOME, and set variables that must have no effect."""
    environment.setenv("TMPDIR", str(folder))
    environment.setenv("HOME", str(folder))
    environment.setenv("AWS_PROFILE", "of-the-user")
    environment.setenv("AWS_SESSION_TOKEN", "of-the-user")
    environment.setenv("HTTP_PROXY", "http://127.0.0.1:9")


def process_parents() -> dict[int, int]:
    """Return the parent of every running process, by process id."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listing.stdout.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def descendants_of(pid: int) -> set[int]:
    """Return a process and its running descendants."""
    family, parents = {pid}, process_parents()
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


@contextmanager
def demo(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo in a process group of its own."""
    command = [sys.executable, "-m", "stoker.cli", "demo", *arguments]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], sign: str) -> str:
    """Return the process's output up to a line that matches the pattern ``sign`` at its begin, or up to its end."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(sign, line):
            break
    return "".join(lines)


def cells(output: str, label: str) -> tuple[float, float]:
    """Return the two figures in a row of the table."""
    line = next(line for line in output.splitlines() if line.startswith(f"  {label}  "))
    first, second = re.findall(r"[\d,]*\.?\d+", line.removeprefix(f"  {label}"))
    return float(first.replace(",", "")), float(second.replace(",", ""))
