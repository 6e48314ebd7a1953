"""One rank of trainings with a cache process; ``python -m support.cluster_rank`` connects to such a process."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from stoker import FetchConfig
from stoker._cluster import client, connection, peers
from stoker._cluster.launch import connect
from stoker._cluster.spec import ClusterSpec
from stoker._fetch import mapped_objects, tier_chain

URL = "s3://cluster/train"


_PATIENCE = {
    (module, name): getattr(module, name)
    for module, name in [
        (tier_chain, "SINGLE_FLIGHT_SECONDS"),
        (peers, "SETTLE_SECONDS"),
        (client, "PEEK_SECONDS"),
        (connection, "SILENT_SECONDS"),
        (mapped_objects, "SLOW_SECONDS"),
    ]
}
"""Times after which objects are read from the bucket: on a busy machine too early for checks that count such reads."""


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        print(os.getpid(), record.getMessage(), file=sys.stderr, flush=True)  # of a worker process, too


def train(
    tell: Callable[[int], None],
    *,
    cluster: str,
    workers: int = 0,
    seconds: float = 0.0,
    epochs: int = 3,
    meets: bool = False,
    twins: int = 0,
    stops_after: int = 0,
    patience_seconds: float = 0.0,
    runtime_folder: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train; tell the number of each epoch once it has begun, and return what was seen by epoch, and more.

    Waits for caches are as long as ``patience_seconds`` if it is given. With ``meets``, ranks wait for each other after
    each step; with ``twins``, they are a mesh whose second dimension, of this size, gets the same batches. With
    ``stops_after``, the loader is closed after this number of batches of the first epoch, and another one resumes from
    its state.
    """
    from torch import distributed
    from torch.utils.data import DataLoader  # takes seconds, and is not needed for a connection

    from stoker_torch import Loader, StreamDataset

    os.environ["XDG_RUNTIME_DIR"] = runtime_folder
    for (module, name), usual_seconds in _PATIENCE.items():
        setattr(module, name, patience_seconds or usual_seconds)
    if twins:
        settings["mesh"] = _mesh(twins)["dp"]
    texts = _Texts()
    logging.getLogger("stoker.cluster").addHandler(texts)
    settings = {"batch_size": 32, "seed": 1, "memory": "64MB", "cluster": cluster, **settings}
    settings["epochs"] = epochs  # nothing is fetched for later ones
    settings["fetch"] = FetchConfig(hedge=False)  # on a busy machine, hedges read what the checks count
    delivered, longest = [], 0.0
    loader = StreamDataset(URL, **settings) if workers else Loader(URL, **settings)
    dataset: Any = loader
    batches: Any = loader
    if workers:
        batches = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=_watch_worker)
    early: list[int] = []
    if stops_after and isinstance(loader, Loader):
        for _, batch in zip(range(stops_after), loader, strict=False):
            early += batch["id"].tolist()
        state = loader.state_dict()
        loader.close()
        batches = loader = Loader(URL, **settings)
        loader.load_state_dict(state)
    for epoch in range(epochs):
        ids, early = early, []
        begun, is_first = time.perf_counter(), True
        for batch in batches:
            if is_first:
                tell(epoch)  # ranks compare their settings before
            else:
                longest = max(longest, time.perf_counter() - begun)
            is_first = False
            ids += batch["id"].tolist()
            assert batch["x"][:, -1].tolist() == [number % 251 for number in batch["id"].tolist()]
            time.sleep(seconds)
            if meets:
                distributed.barrier()  # as a training's collectives keep ranks together
            begun = time.perf_counter()
        delivered.append(ids)
    report = {"epochs": delivered, "longest_wait": longest, "warnings": "\n".join(texts.texts), "states": {}}
    logging.getLogger("stoker.cluster").removeHandler(texts)
    if isinstance(loader, Loader):
        report["states"] = loader.stats().tier_states
        loader.close()
    return report


def _start_timer() -> threading.Timer:
    """Print after some time where the threads of this process are, unless the timer is cancelled."""
    timer = threading.Timer(100, faulthandler.dump_traceback)  # dump_traceback_later() blocks in a forked process
    timer.daemon = True
    timer.start()
    return timer


def _watch_worker(_: int) -> None:
    _start_timer()


def _meet(meeting: str) -> None:
    """Join the other ranks."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


def _mesh(twins: int) -> Any:
    """Return the device mesh of the ranks."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (distributed.get_world_size() // twins, twins), mesh_dim_names=("dp", "tp"))


def run(channel: Connection, environment: dict[str, str], meeting: str) -> None:
    """Be a rank: train with each of the settings that come in, and send the report.

    Args:
        channel: where settings come from and reports go; the rank ends with it.
        environment: this process's.
        meeting: where ranks join a process group; empty for none.
    """
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # of workers, which is that of this process until now
    if meeting:
        _meet(meeting)
    with suppress(EOFError):
        while True:
            settings = channel.recv()
            timer = _start_timer()
            channel.send(train(channel.send, **settings))
            timer.cancel()


def main(cluster: str) -> None:
    """Connect to a cache process, and print its process id."""
    link = connect(ClusterSpec.parse(cluster), cluster, threading.Event())
    time.sleep(0.5)
    print(*struct.unpack("3i", link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:1])
    link.connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
