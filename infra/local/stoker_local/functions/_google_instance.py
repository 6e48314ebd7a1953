"""One instance of a Google function: the real Functions Framework in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker_local.functions._processes import FunctionProcess, ProcessPlan, Warden, peak_memory_bytes
from stoker_local.functions._specs import GoogleSpec

__all__ = ["Instance", "InstanceConfig"]

_TERMINATION_SECONDS = 10.0
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """What all instances of a Google function have in common.

    Attributes:
        environment: what the platform gives it; the function's own variables come on top.
    """

    spec: GoogleSpec
    host: str
    environment: Mapping[str, str] = field(repr=False)
    warden: Warden


class Instance(FunctionProcess):
    """One instance. :meth:`live` is its life; the rest may be used while that runs.

    Attributes:
        url: where it listens.
        active: requests under way.
        start_seconds: from its start until it listened.
    """

    def __init__(self, name: str, config: InstanceConfig) -> None:
        super().__init__(name)
        self.active = 0
        self.start_seconds = 0.0
        self._config = config
        self._port = _reserved_port(config.host)
        self._is_killed = False
        self.url = f"http://{_bracketed(config.host)}:{self._port}"

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended, nor is about to."""
        return not self._is_killed and not self.ended.done()

    async def live(self) -> None:
        """Run the process until it ends, and clear up after it; cancelled, end it as Cloud Run does."""
        code = -signal.SIGKILL
        try:
            async with self._config.warden.running(self._plan(), self._output) as process:
                self._pid = process.pid
                try:
                    code = await process.wait()
                except asyncio.CancelledError:
                    await _terminate(process)
                    raise
        finally:
            self._finish(code)

    def _plan(self) -> ProcessPlan:
        spec = self._config.spec
        return ProcessPlan(
            command=self._command(),
            environment=self._environment(),
            folder=spec.folder,
            memory_bytes=spec.memory_bytes,
            tmp_bytes=spec.memory_bytes,  # files written count as memory there
        )

    def _command(self) -> tuple[str, ...]:
        spec, host = self._config.spec, _bracketed(self._config.host)
        program = Path(sys.executable).with_name("functions-framework")
        return (
            *(str(program), "--target", spec.target, "--source", str(Path(spec.source).absolute())),
            *("--signature-type", spec.signature, "--host", host, "--port", str(self._port), "--asgi"),
        )

    def _environment(self) -> dict[str, str]:
        config, spec = self._config, self._config.spec
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            **config.environment,
            **spec.environment,
            "FUNCTION_TARGET": spec.target,
            "FUNCTION_SIGNATURE_TYPE": spec.signature,
            "K_SERVICE": spec.name,
            "K_REVISION": f"{spec.name}-00001",
            "K_CONFIGURATION": spec.name,
            "PORT": str(self._port),
            "CLOUD_RUN_TIMEOUT_SECONDS": str(int(spec.timeout_seconds) or 1),
        }

    async def listening(self) -> bool:
        """Wait until it takes connections; return whether it does, rather than have ended."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while self.is_alive and loop.time() < started_at + _START_SECONDS:
            try:
                _, writer = await asyncio.open_connection(self._config.host, self._port)
            except OSError:
                await asyncio.wait({self.ended}, timeout=_LOOK_SECONDS)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.start_seconds = loop.time() - started_at
            return True
        self.kill()
        return False

    @property
    def peak_bytes(self) -> int:
        """The most resident memory that one of its processes has had, 0 where the system does not tell."""
        return 0 if self.ended.done() else peak_memory_bytes(self._pid)

    def kill(self) -> None:
        """End the process and all that it has started, at once."""
        super().kill()
        self._is_killed = True


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end and give it ten seconds."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)  # one that stands still could not hear
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TERMINATION_SECONDS):
            await process.wait()


def _reserved_port(host: str) -> int:
    """Return a port that only who asks for it by number gets, for a minute.

    The framework can only be told a port, not be given a socket. After a connection that this side has closed first,
    the system gives the port to nobody who wants any (TIME_WAIT; Stevens, "TCP/IP Illustrated", section 13.5).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()
        with socket.create_connection(address[:2]):
            server.accept()[0].close()
    port: int = address[1]
    return port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
