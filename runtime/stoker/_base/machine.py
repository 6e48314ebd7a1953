"""The resources that this process may use: memory, cores and open files, with the limits of containers."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker._base.threads import count_cores

_START_TIME_FIELD = 19  # of those behind the name of the program in parentheses
_begun_seconds = time.monotonic()
_NO_LIMIT_BYTES = 1 << 62  # the first version of control groups writes a huge number where there is no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources that this process may use.

    Attributes:
        memory_bytes: memory of the machine, or less if a control group or a limit of the process is lower, in bytes.
        free_bytes: unused part of it, in bytes; the kernel's page cache counts as free.
        limited_by: name of the limit that makes ``memory_bytes`` less than the machine's memory, else ``""``.
        cores: number of cores; a control group may grant a fraction of one.
        open_files: soft limit of open files.
        max_open_files: hard limit of open files, to which the process may raise the soft one.
    """

    memory_bytes: int
    free_bytes: int
    limited_by: str
    cores: float
    open_files: int
    max_open_files: int


def process_seconds(root: Path = Path("/")) -> float:
    """Return for how long this process has run; where the system does not tell, since it imported this module.

    Args:
        root: folder that contains ``proc``.
    """
    try:
        fields = (root / "proc/self/stat").read_text("ascii").rpartition(")")[2].split()
        begun_seconds = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - begun_seconds
    except (OSError, ValueError, AttributeError):
        return time.monotonic() - _begun_seconds


def _begin_after_fork() -> None:
    global _begun_seconds
    _begun_seconds = time.monotonic()


os.register_at_fork(after_in_child=_begin_after_fork)


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Return the resources that this process may use.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    meminfo = _meminfo(root)
    memory_bytes = meminfo.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free_bytes, limited_by = meminfo.get("MemAvailable", memory_bytes), ""
    for folder, limit, used in _memory_groups(root):
        if limit < memory_bytes:
            memory_bytes, limited_by = limit, f"the control group {folder}"
        free_bytes = min(free_bytes, max(0, limit - used))
    space_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= space_bytes < memory_bytes:
        memory_bytes, limited_by = space_bytes, "RLIMIT_AS (ulimit -v)"
    soft, hard = (_limit_or_maximum(number) for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Machine(
        memory_bytes=memory_bytes,
        free_bytes=min(free_bytes, memory_bytes),
        limited_by=limited_by,
        cores=_cores(root),
        open_files=soft,
        max_open_files=hard,
    )


def _limit_or_maximum(number: int) -> int:
    return 1 << 30 if number == resource.RLIM_INFINITY else number


def _meminfo(root: Path) -> dict[str, int]:
    fields = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.removesuffix("kB").strip()
        if number.isdecimal():
            fields[name] = int(number) * 1024
    return fields


def _groups(root: Path, controller: str) -> list[Path]:
    """Return this process's control group and its parents, in version 1 or 2 of control groups."""
    groups = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, place = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        group = top / place.lstrip("/")
        groups += [each for each in (group, *group.parents) if each == top or top in each.parents]
    return groups


def _memory_groups(root: Path) -> list[tuple[Path, int, int]]:
    """Return the control groups that limit memory: folder, limit and usage in bytes."""
    groups = []
    for group in _groups(root, "memory"):
        for limit_name, used_name in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            limit, used = (_text(group / f"memory.{name}").strip() for name in (limit_name, used_name))
            if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                groups.append((Path("/") / group.relative_to(root), int(limit), int(used) if used.isdecimal() else 0))
    return groups


def _cores(root: Path) -> float:
    cores = float(count_cores())
    for group in _groups(root, "cpu"):
        quota, period = (_text(group / "cpu.max").split() or ["", ""])[:2]
        if not quota:
            quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) / int(period))
    return cores


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


def raise_file_limit() -> None:
    """Let this process open as many files and connections as the system allows."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems refuse the limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
