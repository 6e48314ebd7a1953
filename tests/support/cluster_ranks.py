"""Processes that are the ranks of trainings with cache processes, one training after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Ranks"]


class Ranks:
    """Ranks that begin a training when they are told. Starting one takes seconds: torch is imported.

    Args:
        environments: environment of each rank.
        meeting: where they join a process group; default empty: in none.

    Attributes:
        ranks: the processes.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], meeting: str = "") -> None:
        command = [sys.executable, "-m", "support.cluster_rank", json.dumps({"meeting": meeting})]
        self.ranks = [
            subprocess.Popen(command, env=each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for each in environments
        ]
        self.is_training = False

    def begin(self, runtime_folders: Sequence[str] = (), **settings: Any) -> None:
        """Have the ranks begin a training; see :func:`support.cluster_rank.train`.

        Args:
            runtime_folders: folder of each rank for sockets; default this process's.
            settings: other arguments.
        """
        folders = runtime_folders or len(self.ranks) * [os.environ["XDG_RUNTIME_DIR"]]
        for rank, folder in zip(self.ranks, folders, strict=True):
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"runtime_folder": folder, **settings}) + "\n")
            rank.stdin.flush()
        self.is_training = True

    def reports(self) -> list[dict[str, Any]]:
        """Wait for the end of the training; return the reports of all ranks but those that were killed."""
        reports = []
        for rank in self.ranks:
            assert rank.stdout is not None
            while (line := rank.stdout.readline()).startswith("epoch"):
                pass
            if line:
                reports.append(json.loads(line))
            else:
                assert rank.wait(10) == -signal.SIGKILL
        self.is_training = False
        return reports

    def wait_for_epoch(self, number: int, rank: int) -> None:
        """Wait until a rank has begun an epoch."""
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        while stdout.readline() != f"epoch {number}\n":
            assert self.ranks[rank].poll() is None

    @property
    def are_ready(self) -> bool:
        """Whether all of them can begin a training."""
        return not self.is_training and all(rank.poll() is None for rank in self.ranks)

    def end(self) -> None:
        """Have the ranks end, and wait for it."""
        for rank in self.ranks:
            rank.communicate(timeout=60)

    def kill(self) -> None:
        """End the ranks that still run."""
        for rank in self.ranks:
            with rank:
                rank.kill()
