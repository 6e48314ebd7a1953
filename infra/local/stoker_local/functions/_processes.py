"""Processes of functions: started with limits on memory and ``/tmp``, and killed when this process ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Generic, Literal, TypeVar

from stoker_local._host import BackgroundTasks
from stoker_local.functions._config import (
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultInjector,
    FunctionFaultKind,
    FunctionSpec,
    GoogleSpec,
)
from stoker_local.functions._statistics import FunctionRecorder

_LAUNCHER = Path(__file__).with_name("_launcher.py")
_TMP = Path("/tmp")  # noqa: S108  (the function's own)
_PROBE_SECONDS = 30.0
ADDRESS_ALLOWANCE_BYTES = 1 << 30
"""Address space beyond resident memory that libraries, stacks and allocator arenas reserve, in bytes."""
_PIPE_BYTES = 1 << 16
_MAX_OUTPUT_BYTES = 1 << 16
_TAIL_BYTES = 4096
AnySpec = TypeVar("AnySpec", bound=FunctionSpec | GoogleSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """The command, environment and limits of a process.

    Attributes:
        command: program, which must be a path, and its arguments.
        environment: complete environment, except the variables that name its ``/tmp``.
        folder: folder of its code and working folder; visible even if it is under ``/tmp``.
        memory_bytes: memory limit, in bytes.
        tmp_bytes: size limit of its ``/tmp``, in bytes.
        open_files: maximum number of open files; None is this process's own limit.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    memory_bytes: int
    tmp_bytes: int
    open_files: int | None = None


class ProcessSupervisor:
    """Runs processes and ensures that they end with this one; :func:`process_supervisor` creates it.

    Attributes:
        tmp: kind of the processes' ``/tmp``.
    """

    def __init__(self, tmp: Literal["tmpfs", "folder"], reaper: asyncio.StreamWriter) -> None:
        self.tmp = tmp
        self._reaper = reaper

    @asynccontextmanager
    async def launch(self, plan: ProcessPlan, output: OutputPipe) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a process in a new process group; leaving the context kills the group and removes its folder.

        Args:
            plan: process to run.
            output: pipe that receives its standard output and error.
        """
        tmp = None if self.tmp == "tmpfs" else tempfile.mkdtemp(prefix="stoker-tmp-")
        home = {"HOME": "/tmp"} if tmp is None else {"HOME": tmp, "TMPDIR": tmp}  # noqa: S108  (its own)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch_command(plan, tmp_folder=tmp),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                env={**plan.environment, **home},
                cwd=plan.folder,
                process_group=0,  # so that its children are frozen and killed with it
            )
            output.close_writer()
            self._reaper.write(b"+%d\n" % process.pid)
            try:
                yield process
            finally:
                signal_group(process.pid, signal.SIGKILL)
                await process.wait()
                self._reaper.write(b"-%d\n" % process.pid)
        finally:
            if tmp is not None:
                shutil.rmtree(tmp, ignore_errors=True)


@asynccontextmanager
async def process_supervisor(tmp: Literal["auto", "tmpfs", "folder"]) -> AsyncIterator[ProcessSupervisor]:
    """Yield a supervisor whose processes are killed when this process ends, in whatever way.

    Raises:
        OSError: ``tmp`` is ``tmpfs`` and this system does not allow it.
    """
    chosen = choose_tmp(tmp)
    reaper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_LAUNCHER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={},
        process_group=0,  # so that a terminal's Ctrl-C does not reach it
    )
    assert reaper.stdin is not None  # noqa: S101  (for the type checker)
    try:
        yield ProcessSupervisor(chosen, reaper.stdin)
    finally:
        reaper.stdin.write(b".\n")
        reaper.stdin.close()
        await reaper.wait()


def launch_command(plan: ProcessPlan, *, tmp_folder: str | None) -> tuple[str, ...]:
    """Return the launcher's command for a plan; without ``tmp_folder``, the process gets a private tmpfs."""
    settings = {
        "command": list(plan.command),
        "parent": os.getpid(),
        "address_bytes": plan.memory_bytes + ADDRESS_ALLOWANCE_BYTES,
        "file_bytes": plan.tmp_bytes if tmp_folder else None,
        "open_files": plan.open_files,
        "tmp_bytes": None if tmp_folder else plan.tmp_bytes,
        "keep": _under_tmp(sys.prefix, sys.base_prefix, plan.folder, *sys.path),
    }
    return (sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(settings))


def choose_tmp(kind: Literal["auto", "tmpfs", "folder"]) -> Literal["tmpfs", "folder"]:
    """Return the kind of ``/tmp`` that processes get, after testing whether a private one is possible.

    Raises:
        OSError: ``tmpfs`` was requested and this system does not allow it.
    """
    if kind == "folder" or (kind == "auto" and sys.platform != "linux"):
        return "folder"
    problem = _mount_problem()
    if kind == "tmpfs" and problem:
        raise OSError(f"this system does not allow a private /tmp for functions ({problem}); use tmp='folder'")
    return "folder" if problem else "tmpfs"


@cache
def _mount_problem() -> str:
    """Return why processes cannot have a private ``/tmp`` on this system; empty if they can."""
    true = (shutil.which("true") or "/bin/true",)
    plan = ProcessPlan(command=true, environment={}, folder="", memory_bytes=1 << 30, tmp_bytes=1 << 20)
    probe = launch_command(plan, tmp_folder=None)
    result = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
    return (result.stderr.strip() or "it failed") if result.returncode else ""


def _under_tmp(*paths: str) -> list[str]:
    folders = {Path(path).resolve() for path in paths if path}
    below = {path for path in folders if _TMP in path.parents and path.is_dir()}
    return sorted(str(path) for path in below if below.isdisjoint(path.parents))


def peak_memory_bytes(pid: int) -> int:
    """Return the largest peak of resident memory of a process or its descendants, in bytes; 0 if unknown.

    The peaks are not added, because forked processes share pages.
    """
    status = _read_proc_file(f"/proc/{pid}/status")
    peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return max([int(next(peaks, "0")) << 10, *map(peak_memory_bytes, _child_pids(pid))])


def _child_pids(pid: int) -> list[int]:
    threads = f"/proc/{pid}/task"
    try:
        names = os.listdir(threads)  # noqa: PTH208  (pathlib is slow, and this runs after every invocation)
    except OSError:
        return []
    return [int(child) for name in names for child in _read_proc_file(f"{threads}/{name}/children").split()]


def _read_proc_file(path: str) -> str:
    """Return the text of a file in ``/proc``; empty if its process or thread has ended."""
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process group; a group that has ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


class OutputPipe:
    """A pipe that collects the output of a process on the event loop.

    Output that a process writes before its response is in the pipe when the response arrives: :meth:`take` returns it.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """Close this process's writing end; the started process has its own copy."""
        os.close(self.writer)
        self.writer = -1

    def take(self) -> bytes:
        """Return the output since the last call, at most its last 64 KiB."""
        self._read_all()
        output = bytes(self._buffer)
        self._buffer.clear()
        return output

    def close(self) -> None:
        """Read the remaining output and close the pipe; :meth:`take` still returns the output."""
        self._read_all()
        self._loop.remove_reader(self._reader)
        for descriptor in (self._reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self.writer = -1

    def _read_all(self) -> None:
        """Read at most one pipe's capacity, because the process may write without end."""
        left_bytes = _PIPE_BYTES
        while left_bytes > 0 and (read_bytes := self._read()):
            left_bytes -= read_bytes

    def _read(self) -> int:
        """Read once; return the number of bytes."""
        if self._reader < 0:
            return 0
        try:
            piece = os.read(self._reader, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # every writer has closed the pipe
            self._loop.remove_reader(self._reader)
            return 0
        self._buffer += piece
        del self._buffer[:-_MAX_OUTPUT_BYTES]
        return len(piece)


def tail(log: bytes) -> bytes:
    """Return the last 4 KiB of a log, as much as Lambda returns to callers."""
    return log[-_TAIL_BYTES:]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig(Generic[AnySpec]):
    """Configuration and services that all instances of a function share.

    Attributes:
        environment: environment variables from the platform; the function's own variables override them.
        recorder: statistics and events of the function.
        faults: draws the faults of invocations.
    """

    spec: AnySpec
    cloud: FunctionCloudConfig
    environment: Mapping[str, str] = field(repr=False)
    supervisor: ProcessSupervisor
    recorder: FunctionRecorder
    faults: FunctionFaultInjector
    tasks: BackgroundTasks


class FunctionProcess(ABC, Generic[AnySpec]):
    """The process group of one instance, which can be signalled while it runs.

    Attributes:
        name: name of the instance, for logs and statistics.
        exit_future: future of the exit code; done once the process has ended and its resources are released.
        peak_bytes: peak resident memory at the last measurement, in bytes; 0 if the system does not report it.
        output: output of the processes.
    """

    def __init__(self, name: str, config: InstanceConfig[AnySpec]) -> None:
        self.name = name
        self._config = config
        self.exit_future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.peak_bytes = 0
        self.output = OutputPipe()
        self._pid = 0
        self._is_killed = False

    @abstractmethod
    def _plan_process(self) -> AbstractAsyncContextManager[ProcessPlan]:
        """Yield the plan of the process; resources that it needs exist while the context is open."""

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        """Prepare a process for being killed; by default, do nothing."""

    async def run_process(self) -> None:
        """Run the process until it ends, and release its resources; end it first if cancelled."""
        code = -signal.SIGKILL
        try:
            async with self._plan_process() as plan, self._config.supervisor.launch(plan, self.output) as process:
                self._pid = process.pid
                try:
                    code = await process.wait()
                except asyncio.CancelledError:
                    await self._terminate(process)
                    raise
        finally:
            self.exit_future.set_result(code)
            self.output.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process has neither ended nor been killed."""
        return not self._is_killed and not self.exit_future.done()

    def kill(self) -> None:
        """Kill the process group at once, even if it is frozen."""
        self._signal(signal.SIGKILL)
        self._is_killed = True

    def freeze(self) -> None:
        """Stop the process group (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process group (SIGCONT)."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def inject_fault(self, fault: FunctionFault | None) -> Iterator[None]:
        """Inject a kill or a freeze at its time, unless the block is left earlier; leaving it ends a freeze."""
        if fault is None or fault.kind not in (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE):
            yield
            return
        loop = asyncio.get_running_loop()

        def strike() -> None:
            self._config.recorder.record_fault(fault.kind)
            (self.kill if fault.kind is FunctionFaultKind.KILL else self.freeze)()

        timers = [
            loop.call_later(fault.after_seconds, strike),
            loop.call_later(fault.after_seconds + fault.freeze_seconds, self.thaw),
        ]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            self.thaw()

    def _signal(self, number: signal.Signals) -> None:
        if self._pid and not self.exit_future.done():
            signal_group(self._pid, number)

    def exceeds_memory(self, memory_bytes: int) -> bool:
        """Measure the resident memory of the processes; return whether the peak of one is above ``memory_bytes``."""
        if not self.exit_future.done():
            self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self._pid))
        return self.peak_bytes > memory_bytes
