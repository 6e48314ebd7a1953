"""Processes that are the ranks of trainings with cache processes, one training after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from support import cluster_rank
from support.preloaded import preloaded_forkserver

__all__ = ["Ranks", "ranks_forked_with_torch"]


@contextmanager
def ranks_forked_with_torch() -> Iterator[None]:
    """Have what ranks need imported once: for each of them, it would take seconds."""
    with preloaded_forkserver("stoker_torch"):
        yield


class Ranks:
    """Ranks that begin a training when they are told.

    Args:
        environments: environment of each rank.
        meeting: where they join a process group; default empty: in none.

    Attributes:
        ranks: the processes.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], meeting: str = "") -> None:
        context = get_context("forkserver")
        self.ranks, self._channels = [], []
        for environment in environments:
            ours, its = context.Pipe()
            rank = context.Process(target=cluster_rank.run, args=(its, dict(environment), meeting))
            rank.start()
            its.close()
            self.ranks.append(rank)
            self._channels.append(ours)
        self.is_training = False

    def begin(self, runtime_folders: Sequence[str] = (), **settings: Any) -> None:
        """Have the ranks begin a training; see :func:`support.cluster_rank.train`.

        Args:
            runtime_folders: folder of each rank for sockets; default this process's.
            settings: other arguments.
        """
        folders = runtime_folders or len(self.ranks) * [os.environ["XDG_RUNTIME_DIR"]]
        for channel, folder in zip(self._channels, folders, strict=True):
            channel.send({"runtime_folder": folder, **settings})
        self.is_training = True

    def reports(self) -> list[dict[str, Any]]:
        """Wait for the end of the training; return the reports of all ranks but those that were killed."""
        reports = []
        for rank, channel in zip(self.ranks, self._channels, strict=True):
            try:
                while isinstance(message := channel.recv(), int):
                    pass
                reports.append(message)
            except EOFError:
                rank.join(10)
                assert rank.exitcode == -signal.SIGKILL
        self.is_training = False
        return reports

    def wait_for_epoch(self, number: int, rank: int) -> None:
        """Wait until a rank has begun an epoch."""
        while self._channels[rank].recv() != number:
            pass

    @property
    def are_ready(self) -> bool:
        """Whether all of them can begin a training."""
        return not self.is_training and all(rank.is_alive() for rank in self.ranks)

    def end(self) -> None:
        """Have the ranks end, and wait for it."""
        for channel in self._channels:
            channel.close()
        for rank in self.ranks:
            rank.join(60)
            assert rank.exitcode is not None

    def kill(self) -> None:
        """End the ranks that still run."""
        for rank, channel in zip(self.ranks, self._channels, strict=True):
            rank.kill()
            rank.join()
            channel.close()
