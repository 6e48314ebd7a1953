"""Programs in processes of their own, forked from an interpreter that has imported what takes long to import.

Each program is the process's ``__main__``, runs in its main thread, and ends through the interpreter's own end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer
from typing import IO

__all__ = ["ForkedPrograms", "RunningProgram", "forked_programs"]

_BASE = """
import gc, json, os, socket, sys
{imports}
gc.freeze()  # no program has to look through what was imported
channel = socket.socket(fileno=int(sys.argv[1]))
waiting = set()
while True:
    message, files, *_ = socket.recv_fds(channel, 1 << 16, 3)
    waiting = {{child for child in waiting if not os.waitpid(child, os.WNOHANG if message else 0)[0]}}
    if not message:
        channel.close()
        sys.exit()
    if not (child := os.fork()):
        break
    waiting.add(child)
    for file in files:
        os.close(file)
channel.close()
reply = files.pop()
if child := os.fork():  # the program's parent is a process that waits for it
    for file in files:
        os.close(file)
    os.write(reply, b"%d\\n" % child)
    os.write(reply, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
os.close(reply)
for file, number in zip(files, (1, 2)):
    os.dup2(file, number)
    os.close(file)
sys.argv, environment, folder = json.loads(message)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
__file__ = sys.argv[0]
sys.path[0] = os.path.dirname(__file__)
del channel, message, files, file, number, child, reply, environment, folder, waiting
with open(__file__) as file:
    program = compile(file.read(), __file__, "exec")
exec(program)
"""


class RunningProgram:
    """A program that runs.

    Attributes:
        pid: its process.
        stdout: its output.
        returncode: its exit code, negative for a signal, once it has been waited for.
    """

    def __init__(self, pid: int, replies: IO[bytes], stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.returncode = pid, stdout, 0
        self._replies, self._stderr = replies, stderr

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def communicate(self, timeout_seconds: float) -> tuple[str, str]:
        """Wait for its end; return what is left of its output, and what it wrote to its error stream.

        Args:
            timeout_seconds: the program is killed after this time.
        """
        hang = Timer(timeout_seconds, self.send_signal, (signal.SIGKILL,))
        hang.start()
        with self.stdout, self._stderr:
            output = self.stdout.read()  # it ends with the last process that has it
            with self._replies:
                self.returncode = int(self._replies.readline())
            hang.cancel()
            hang.join()
            self._stderr.seek(0)
            return output, self._stderr.read()


class ForkedPrograms:
    """An interpreter that forks programs."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, Lock()

    def start(self, program: Path, *arguments: object, environment: Mapping[str, str] | None = None) -> RunningProgram:
        """Start a program from its file, in the current folder.

        Args:
            program: the file.
            arguments: the program's.
            environment: the program's; default this process's.
        """
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # its reader closes it
        ours, its = os.pipe()
        replies, reply = os.pipe()
        words = [str(program), *map(str, arguments)]
        try:
            message = json.dumps([words, dict(os.environ if environment is None else environment), str(Path.cwd())])
            with self._lock:
                socket.send_fds(self._channel, [message.encode()], [its, stderr.fileno(), reply])
        finally:
            os.close(its)
            os.close(reply)
        told = os.fdopen(replies, "rb")
        return RunningProgram(int(told.readline()), told, os.fdopen(ours), stderr)

    def close(self) -> None:
        """Let the interpreter end."""
        self._channel.close()


@contextmanager
def forked_programs(*flags: str, imports: Sequence[str]) -> Iterator[ForkedPrograms]:
    """Start an interpreter that forks programs; at the end of the block, what is left of it is killed.

    Args:
        flags: the interpreter's.
        imports: modules that it imports.
    """
    ours, its = socket.socketpair()
    base = _BASE.format(imports="\n".join(f"import {name}" for name in imports))
    with its:
        command = [sys.executable, *flags, "-c", base, str(its.fileno())]
        # Its output is a pipe, as a program's is: a stream knows from its beginning on whether it can be sought in.
        process = subprocess.Popen(command, pass_fds=[its.fileno()], process_group=0, stdout=subprocess.PIPE)
    programs = ForkedPrograms(ours)
    try:
        yield programs
    finally:
        programs.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
