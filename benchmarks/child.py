"""A program as a child process, with its result, processor time and memory measured from outside."""

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
SAMPLING_SHARE = 0.05  # of one core: sampling the memory of many processes takes processor time from them
_KILLED_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result and resource usage of a program.

    Attributes:
        result: the JSON objects that it printed, one per line, merged; empty if it failed.
        error: reason of a missing result; None if there is one.
        timed_out: whether it was killed at its time limit.
        wall_seconds: time from start to end.
        cpu_seconds: processor time of its whole process tree, user and system.
        peak_bytes: largest sampled proportional set size of the tree (shared pages count once).
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
    """Run a program to its end, or to its timeout, and end all of its processes.

    Args:
        command: program and its arguments.
        environment: variables in addition to those of this process.
        timeout_seconds: time after which it is killed.
        log: file for its standard error; its results are written beside it.
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
            process.returncode = 0  # it was waited for without Popen's knowledge
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
    """Wait for the program; return its exit code, None if it was killed at its time limit, and its processor time."""
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
    except BaseException:  # an interrupt: the program ends with this process
        os.killpg(pid, signal.SIGKILL)
        os.wait4(pid, 0)
        raise
    os.killpg(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)[2]
    return None, usage.ru_utime + usage.ru_stime


@dataclass(slots=True)
class _Tree:
    """A process and its descendants.

    The kernel adds the processor time of children to their parent when it waits for them. ``kill`` ends the others and
    returns their processor time.
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
            total += getattr(memory, "pss", memory.uss)  # only Linux reports the proportional size
        self.peak_bytes = max(self.peak_bytes, total)

    def kill(self) -> float:
        cpu_seconds = 0.0
        left = [process for process in self._seen.values() if process.pid != self.pid and process.is_running()]
        for process in left:
            try:
                cpu_seconds += sum(process.cpu_times()[:4])  # its own time, and that of children it waited for
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
