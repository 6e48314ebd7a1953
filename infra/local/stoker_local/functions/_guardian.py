"""Started by path in a bare interpreter: kills what a cloud leaves behind that dies itself.

Its standard input is a pipe that ends with the cloud, however it dies. Until then, each line says of a process group
that it has come (``+123``) or gone (``-123``), or that all is well and over (``.``), since what was forked from the
cloud's process may still hold the pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def main(lines: Iterable[str]) -> None:
    """Follow the groups to the end, then kill those that are left."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("."):
            break
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.stdin)
