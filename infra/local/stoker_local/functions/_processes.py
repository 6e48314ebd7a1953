"""Functions' processes: started, limited in memory and ``/tmp``, listened to, and killed with this process."""

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

from stoker_local._host import Tasks
from stoker_local.functions._config import (
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultInjector,
    FunctionFaultKind,
    FunctionSpec,
    GoogleSpec,
)
from stoker_local.functions._statistics import Account

_LAUNCHER = Path(__file__).with_name("_launcher.py")
_TMP = Path("/tmp")  # noqa: S108  (the function's own)
_PROBE_SECONDS = 30.0
ADDRESS_ALLOWANCE_BYTES = 1 << 30
"""What libraries, stacks and arenas take of the address space beyond what is ever resident."""
_PIPE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 16
_TAIL_BYTES = 4096
AnySpec = TypeVar("AnySpec", bound=FunctionSpec | GoogleSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A process to run.

    Attributes:
        command: its program must be a path.
        environment: all of it, but for what leads to its ``/tmp``.
        folder: its code, where it runs; it is seen even below ``/tmp``.
        memory_bytes: that it may use, as are ``tmp_bytes`` of its ``/tmp``.
        open_files: at once; None is as many as this process.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    memory_bytes: int
    tmp_bytes: int
    open_files: int | None = None


class Warden:
    """Runs processes; see :func:`warden`.

    Attributes:
        tmp: what they get for a ``/tmp``.
    """

    def __init__(self, tmp: Literal["tmpfs", "folder"], guardian: asyncio.StreamWriter) -> None:
        self.tmp = tmp
        self._guardian = guardian

    @asynccontextmanager
    async def running(self, plan: ProcessPlan, output: Output) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run a process in a group of its own; when the block is left, the whole group is killed and cleared up after.

        Args:
            plan: what runs.
            output: takes what it writes.
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
                process_group=0,  # what it starts is frozen and killed with it
            )
            output.started()
            self._guardian.write(b"+%d\n" % process.pid)
            try:
                yield process
            finally:
                signal_group(process.pid, signal.SIGKILL)
                await process.wait()
                self._guardian.write(b"-%d\n" % process.pid)
        finally:
            if tmp is not None:
                shutil.rmtree(tmp, ignore_errors=True)


@asynccontextmanager
async def warden(tmp: Literal["auto", "tmpfs", "folder"]) -> AsyncIterator[Warden]:
    """Yield a warden, whose processes are killed with this one, however it ends.

    Raises:
        OSError: ``tmpfs`` is wanted and this system does not allow it.
    """
    chosen = choose_tmp(tmp)
    guardian = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_LAUNCHER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={},
        process_group=0,  # a terminal's Ctrl-C is not for it
    )
    assert guardian.stdin is not None  # noqa: S101  (for the type checker)
    try:
        yield Warden(chosen, guardian.stdin)
    finally:
        guardian.stdin.write(b".\n")
        guardian.stdin.close()
        await guardian.wait()


def launch_command(plan: ProcessPlan, *, tmp_folder: str | None) -> tuple[str, ...]:
    """Return the command that becomes a plan's within its limits; ``tmp_folder`` of None gives it a tmpfs."""
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


def choose_tmp(wanted: Literal["auto", "tmpfs", "folder"]) -> Literal["tmpfs", "folder"]:
    """Return which kind of ``/tmp`` processes get, having tried a private one if it is wanted.

    Raises:
        OSError: ``tmpfs`` is wanted and this system does not allow it.
    """
    if wanted == "folder" or (wanted == "auto" and sys.platform != "linux"):
        return "folder"
    problem = _mount_problem()
    if wanted == "tmpfs" and problem:
        raise OSError(f"this system gives functions no private /tmp ({problem}); use tmp='folder'")
    return "folder" if problem else "tmpfs"


@cache
def _mount_problem() -> str:
    """Return why processes can have no ``/tmp`` of their own here, or nothing if they can."""
    true = (shutil.which("true") or "/bin/true",)
    plan = ProcessPlan(command=true, environment={}, folder="", memory_bytes=1 << 30, tmp_bytes=1 << 20)
    probe = launch_command(plan, tmp_folder=None)
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
    return (tried.stderr.strip() or "it failed") if tried.returncode else ""


def _under_tmp(*paths: str) -> list[str]:
    folders = {Path(path).resolve() for path in paths if path}
    below = {path for path in folders if _TMP in path.parents and path.is_dir()}
    return sorted(str(path) for path in below if below.isdisjoint(path.parents))


def peak_memory_bytes(pid: int) -> int:
    """Return the most resident memory that a process or one that it has started has had; 0 where that cannot be told.

    They are not added up: what was forked shares pages.
    """
    status = _text_of(f"/proc/{pid}/status")
    peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return max([int(next(peaks, "0")) << 10, *map(peak_memory_bytes, _children(pid))])


def _children(pid: int) -> list[int]:
    threads = f"/proc/{pid}/task"
    try:
        names = os.listdir(threads)  # noqa: PTH208  (pathlib is slow, and this is done after every invocation)
    except OSError:
        return []
    return [int(child) for name in names for child in _text_of(f"{threads}/{name}/children").split()]


def _text_of(path: str) -> str:
    """Return what the kernel says, or nothing of a process or thread that has ended."""
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started; one that has ended is left in peace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


class Output:
    """The reading end of a pipe on an event loop.

    What a process wrote before it answered is in the pipe when its answer arrives, so :meth:`take` never misses it.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def started(self) -> None:
        """Close this process's writing end: the other process has its own."""
        os.close(self.writer)
        self.writer = -1

    def take(self) -> bytes:
        """Return the end, up to 64 KiB, of what was written since the last call."""
        self._read_all()
        taken = bytes(self._kept)
        self._kept.clear()
        return taken

    def close(self) -> None:
        """Read what is there, and stop; :meth:`take` still returns it."""
        self._read_all()
        self._loop.remove_reader(self._reader)
        for descriptor in (self._reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self.writer = -1

    def _read_all(self) -> None:
        """Read what the pipe holds, and no more than it can: somebody may write without end."""
        left_bytes = _PIPE_BYTES
        while left_bytes > 0 and (read_bytes := self._read()):
            left_bytes -= read_bytes

    def _read(self) -> int:
        """Read once; return how much there was."""
        if self._reader < 0:
            return 0
        try:
            piece = os.read(self._reader, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # every writer has ended
            self._loop.remove_reader(self._reader)
            return 0
        self._kept += piece
        del self._kept[:-_KEPT_BYTES]
        return len(piece)


def tail(log: bytes) -> bytes:
    """Return the last 4 KiB, which is what callers may ask for."""
    return log[-_TAIL_BYTES:]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig(Generic[AnySpec]):
    """What all instances of a function have in common.

    Attributes:
        cloud: what all functions have in common.
        environment: what the platform gives it; the function's own variables come on top.
        account: counts what happens.
        faults: draws what strikes invocations.
        tasks: in which instances live.
    """

    spec: AnySpec
    cloud: FunctionCloudConfig
    environment: Mapping[str, str] = field(repr=False)
    warden: Warden
    account: Account
    faults: FunctionFaultInjector
    tasks: Tasks


class FunctionProcess(ABC, Generic[AnySpec]):
    """The process of one instance, with all that it has started; it can be signalled while it runs.

    Attributes:
        name: of the instance, for logs and statistics.
        ended: its exit code, once it has ended and been cleared up after.
        peak_bytes: most resident memory when it was last measured, 0 where the system does not tell.
        output: what it writes.
    """

    def __init__(self, name: str, config: InstanceConfig[AnySpec]) -> None:
        self.name = name
        self._config = config
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.peak_bytes = 0
        self.output = Output()
        self._pid = 0
        self._is_killed = False

    @abstractmethod
    def _planned(self) -> AbstractAsyncContextManager[ProcessPlan]:
        """Make what the process needs, which is there until it has ended, and plan it."""

    async def _leave(self, process: asyncio.subprocess.Process) -> None:
        """Take leave of a process that is about to be killed."""

    async def live(self) -> None:
        """Run the process until it ends, and clear up after it; cancelled, end it first."""
        code = -signal.SIGKILL
        try:
            async with self._planned() as plan, self._config.warden.running(plan, self.output) as process:
                self._pid = process.pid
                try:
                    code = await process.wait()
                except asyncio.CancelledError:
                    await self._leave(process)
                    raise
        finally:
            self.ended.set_result(code)
            self.output.close()

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended, nor is about to."""
        return not self._is_killed and not self.ended.done()

    def kill(self) -> None:
        """End the process and all that it has started, at once, frozen or not."""
        self._signal(signal.SIGKILL)
        self._is_killed = True

    def freeze(self) -> None:
        """Stop every thread of it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def striking(self, fault: FunctionFault | None) -> Iterator[None]:
        """Let a kill or a freeze strike at its time, unless the block is left before; what is frozen is thawed then."""
        if fault is None or fault.kind not in (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE):
            yield
            return
        loop = asyncio.get_running_loop()

        def strike() -> None:
            self._config.account.struck(fault.kind)
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
        if self._pid and not self.ended.done():
            signal_group(self._pid, number)

    def exceeds(self, memory_bytes: int) -> bool:
        """Measure the resident memory of its processes; return whether one has ever had more than this."""
        if not self.ended.done():
            self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self._pid))
        return self.peak_bytes > memory_bytes
