"""One rank of a training with a cache process, ``python -m support.cluster_rank``; it prints a report as JSON."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

from stoker import FetchConfig
from stoker._cluster.launch import connect
from stoker._cluster.spec import ClusterSpec
from stoker._fetch import tier_chain

URL = "s3://cluster/train"


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        print(os.getpid(), record.getMessage(), file=sys.stderr, flush=True)  # of a worker process, too


def train(
    *,
    cluster: str,
    workers: int = 0,
    seconds: float = 0.0,
    epochs: int = 3,
    meeting: str = "",
    patience_seconds: float = tier_chain.SINGLE_FLIGHT_SECONDS,
    **settings: Any,
) -> dict[str, Any]:
    """Train, in a mesh of two by two ranks if they have a file to meet; return what was seen by epoch, and more."""
    from torch import distributed
    from torch.utils.data import DataLoader  # takes seconds, and is not needed for a connection

    from stoker_torch import Loader, StreamDataset

    tier_chain.SINGLE_FLIGHT_SECONDS = patience_seconds
    if meeting:
        settings["mesh"] = _meet(meeting)["dp"]
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
        batches = DataLoader(dataset, batch_size=None, num_workers=workers, worker_init_fn=_show_hang)
    for epoch in range(epochs):
        print(f"epoch {epoch}", flush=True)
        ids: list[int] = []
        begun = time.perf_counter()
        for batch in batches:
            if ids:
                longest = max(longest, time.perf_counter() - begun)
            ids += batch["id"].tolist()
            assert batch["x"][:, -1].tolist() == [number % 251 for number in batch["id"].tolist()]
            time.sleep(seconds)
            if meeting:
                distributed.barrier()  # as a training's collectives keep ranks together
            begun = time.perf_counter()
        delivered.append(ids)
    report = {"epochs": delivered, "longest_wait": longest, "warnings": "\n".join(texts.texts), "states": {}}
    if isinstance(loader, Loader):
        report["states"] = loader.stats().tier_states
        loader.close()
    return report


def _show_hang(_: int = 0) -> None:
    """Print where the threads of this process are if it does not end in time."""
    timer = threading.Timer(100, faulthandler.dump_traceback)  # dump_traceback_later() blocks in a forked process
    timer.daemon = True
    timer.start()


def _meet(meeting: str) -> Any:
    """Return the device mesh of four ranks."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


if __name__ == "__main__":
    _show_hang()
    arguments = json.loads(sys.argv[1])
    if "connect" in arguments:
        spec = ClusterSpec.parse(arguments["connect"])
        link = connect(spec, arguments["connect"], threading.Event())
        time.sleep(0.5)
        print(*struct.unpack("3i", link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:1])
        link.connection.close()
    else:
        print(json.dumps(train(**arguments)))
