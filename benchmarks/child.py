"""A program as a child process, measured from outside: its result, its processor time, its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.05
SAMPLING_SHARE = 0.05  # of one core: looking at the memory of many processes takes time that they would have used
_KILLED_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program did.

    Attributes:
        result: the JSON objects that it printed, one a line, merged; empty if it failed.
        error: why there is no result, None if there is one.
        timed_out: whether it was killed because it took too long.
        wall_seconds: from start to end.
        cpu_seconds: of its whole process tree, user and system.
        peak_bytes: the tree's proportional set size (pages that processes share count once), the most that was seen.
    """

    result: dict[str, Any]
    error: str | None
    timed_out: bool
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def run_child(
    command: Sequence[str | Path], *, environment: Mapping[str, str], timeout_seconds: float, log: Path
) -> Outcome:
    """Run a program to its end, or to its timeout, and leave none of its processes behind.

    Args:
        command: the program and its arguments.
        environment: variables in addition to this process's.
        timeout_seconds: after this it is killed.
        log: what it prints to standard error goes to this file, and its results beside it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    printed = log.with_suffix(".out")
    started = time.perf_counter()
    with printed.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    tree = _Tree(process.pid)
    try:
        status, cpu_seconds = _watch(process.pid, tree, started + timeout_seconds)
    finally:
        orphans_cpu_seconds = tree.kill()
        if process.returncode is None:
            process.returncode = 0  # it has been waited for, where Popen does not know
    wall_seconds = time.perf_counter() - started
    result, error = _result(printed, log, status, timeout_seconds)
    return Outcome(
        result=result,
        error=error,
        timed_out=status is None,
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds + orphans_cpu_seconds,
        peak_bytes=tree.peak_bytes,
    )


def _watch(pid: int, tree: _Tree, deadline: float) -> tuple[int | None, float]:
    """Wait for the program and return its exit code, None if it was killed as too slow, with its processor time."""
    next_sample = 0.0
    try:
        while time.perf_counter() < deadline:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            if time.perf_counter() >= next_sample:
                begun = time.perf_counter()
                tree.sample()
                ended_at = time.perf_counter()
                next_sample = ended_at + (ended_at - begun) / SAMPLING_SHARE
            time.sleep(POLL_SECONDS)
    except BaseException:  # an interrupt: the program goes with its measurer
        os.killpg(pid, signal.SIGKILL)
        os.wait4(pid, 0)
        raise
    os.killpg(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)[2]
    return None, usage.ru_utime + usage.ru_stime


@dataclass(slots=True)
class _Tree:
    """A process and its descendants.

    The kernel charges a process for those children that it has waited for. ``kill`` ends those that outlived it and
    returns their processor time, which otherwise nobody would count.
    """

    pid: int
    peak_bytes: int = 0
    _seen: dict[int, psutil.Process] = field(default_factory=dict)

    def sample(self) -> None:
        total = 0
        try:
            root = psutil.Process(self.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            self._seen.setdefault(process.pid, process)
            try:
                memory = process.memory_full_info()
            except psutil.Error:
                continue
            total += getattr(memory, "pss", memory.uss)  # only Linux knows the proportional size
        self.peak_bytes = max(self.peak_bytes, total)

    def kill(self) -> float:
        cpu_seconds = 0.0
        left = [process for process in self._seen.values() if process.pid != self.pid and process.is_running()]
        for process in left:
            try:
                cpu_seconds += sum(process.cpu_times()[:4])  # its own and its waited-for children's
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=_KILLED_SECONDS)
        return cpu_seconds


def _result(printed: Path, log: Path, status: int | None, timeout_seconds: float) -> tuple[dict[str, Any], str | None]:
    if status is None:
        return {}, f"no result within {timeout_seconds:g} s"
    if status:
        lines = log.read_text(errors="replace").strip().splitlines()
        return {}, f"exit code {status}: {lines[-1] if lines else 'nothing on standard error'}"[:500]
    result: dict[str, Any] = {}
    try:
        for line in printed.read_text().splitlines():
            if line.startswith("{"):
                result |= json.loads(line)
    except ValueError as error:
        return {}, f"its result is not JSON: {error}"
    return result, None
