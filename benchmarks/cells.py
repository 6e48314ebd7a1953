"""The cells of `benchmarks.compare`: one for every workload, network, loader and kind of run, in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.environments import PEERS
from benchmarks.workloads import WORKLOADS
from stoker_local import PROFILES as SHAPES

OURS = ("ours", "ours_full", "ours_stream")
LOADERS = (*OURS, *PEERS)
LIMITS = ("sockets-8", "sockets", "aiohttp", "gather", "decode")
TITLES = {
    "ours": "stoker",
    "ours_full": "stoker, full shuffle",
    "ours_stream": "stoker, `StreamDataset`, 2 workers",
    "streaming": "MosaicML Streaming",
    "litdata": "LitData",
    "spdl": "SPDL, a pipeline",
    "spdl_torch": "SPDL, PyTorch style",
    "webdataset": "WebDataset",
    "perobject": "one GET a sample",
    "sockets-8": "raw sockets, 8 connections",
    "sockets": "raw sockets, as many as stoker",
    "aiohttp": "plain aiohttp, 8 connections",
    "gather": "gather in memory, one thread",
    "decode": "bare decoding, all cores",
}
EPOCH_PROFILES = ("none", "cloud", "cloud-tail")
PROFILES = {
    **{name: SHAPES[name] for name in EPOCH_PROFILES},
    "cloud-late": replace(SHAPES["cloud-tail"], tail_fraction=0.1),
}
"""Name of a network → its shape: as fast as the machine, like a cloud's, and with 5% or 10% of requests 2 s late."""
KINDS = ("cold", "steady", "stall", "starts", "limit")
STEP_SECONDS = 0.05
STARTS = 200
STARTED_SHARE = 0.99
STARTED = ("images", "jpegs")  # workloads whose starts are measured; tokens start as images do

# Epochs of a steady run: at least ten after the first and before the last ones, which are read from memory.
OURS_EPOCHS = {("images", "raw"): 31, ("jpegs", "raw"): 13, ("jpegs", "decoded"): 3, ("tokens", "raw"): 15}
FULL_EPOCHS = {("images", "raw"): 15, ("jpegs", "raw"): 3, ("jpegs", "decoded"): 3, ("tokens", "raw"): 8}
STREAM_EPOCHS = 4
PEER_EPOCHS = 3
LIMIT_EPOCHS = {"images": 13, "jpegs": 4, "tokens": 8}  # the first and the last do not count

# On 2 cores, each peer's fastest; see peers/README.md.
WORKERS = {"perobject": 16}
OTHER_WORKERS = 2
# One request a sample is slow, so its rate is measured on a part of the data.
MAX_SAMPLES = {"perobject": 4000, "spdl_torch": 12_000}
EVERY_ROUND = (*OURS, "spdl")  # several targets are ratios between these
ONCE = ("perobject", "spdl_torch")  # their cells are long and their ratios far from any target: one round


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: one program, once.

    Attributes:
        workload: name of a workload of ``benchmarks.workloads``.
        mode: ``raw`` or ``decoded``.
        profile: profile of the local bucket.
        loader: name of the loader or the limit.
        kind: ``cold``, one epoch; ``steady``, several; ``stall``, one epoch with a simulated step after every
            batch; ``starts``, many first batches, each of a new loader; ``limit``.
        samples: number of samples of the workload, for this loader.
        round: number of the round, from 0.
    """

    workload: str
    mode: str
    profile: str
    loader: str
    kind: str
    samples: int
    round: int

    @property
    def epochs(self) -> int:
        match self.kind, self.loader:
            case "steady", "ours" | "spdl":  # which keep nothing on disk
                return OURS_EPOCHS[self.workload, self.mode]
            case "steady", "ours_full":
                return FULL_EPOCHS[self.workload, self.mode]
            case "steady", "ours_stream":
                return STREAM_EPOCHS
            case "steady", _:
                return PEER_EPOCHS
            case "limit", _:
                return 1 if self.loader == "decode" else LIMIT_EPOCHS[self.workload]
        return 1

    @property
    def workers(self) -> int:
        return WORKERS.get(self.loader, OTHER_WORKERS)

    def __str__(self) -> str:
        return f"{self.workload}/{self.mode}/{self.profile}/{self.loader}/{self.kind}/{self.round}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected cells.

    Attributes:
        workloads: names of workloads.
        profiles: names of profiles.
        loaders: names of loaders and limits.
        kinds: kinds of runs.
        rounds: number of measurements of each, in turn with the others.
        scale: scale of the workloads.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    profiles: tuple[str, ...] = tuple(PROFILES)
    loaders: tuple[str, ...] = (*LOADERS, *LIMITS)
    kinds: tuple[str, ...] = KINDS
    rounds: int = 3
    scale: float = 1.0

    def samples(self, workload: str, loader: str) -> int:
        samples = WORKLOADS[workload].scaled(self.scale)
        return min(samples, MAX_SAMPLES.get(loader, samples))

    def cells(self) -> Iterator[Cell]:
        """Yield all cells in the order of measurement: all loaders and limits of a round one after the other."""
        for workload in self.workloads:
            for profile in self.profiles:
                for number in range(self.rounds):
                    for mode, loader, kind in _runs(workload, profile, number):
                        if loader in self.loaders and kind in self.kinds:
                            yield Cell(
                                workload=workload,
                                mode=mode,
                                profile=profile,
                                loader=loader,
                                kind=kind,
                                samples=self.samples(workload, loader),
                                round=number,
                            )


def _runs(workload: str, profile: str, number: int) -> Iterator[tuple[str, str, str]]:
    """Yield mode, loader and kind of the cells of one round."""
    if profile == "cloud-late":
        if workload in STARTED:
            yield "raw", "ours", "starts"
        return
    if profile == "cloud-tail" and workload != "jpegs":
        return  # the loader with the most requests, whose rate is the network's
    for mode in WORKLOADS[workload].modes:
        if mode == "decoded" and profile != "none":
            continue  # the processor bounds it on every network
        for loader in LOADERS:
            if (loader in ONCE and number) or (loader == "ours_stream" and (mode, profile) != ("raw", "none")):
                continue
            yield mode, loader, "cold"
            if loader in EVERY_ROUND or (profile == "none" and number == 0 and loader != "perobject"):
                yield mode, loader, "steady"
            if profile == "cloud" and (number == 0 or loader in ("ours", "spdl")):
                yield mode, loader, "stall"
        for limit in _limits(mode, profile):
            yield mode, limit, "limit"


def _limits(mode: str, profile: str) -> tuple[str, ...]:
    if mode == "decoded":
        return ("decode",)
    return ("sockets-8", "sockets", "aiohttp", *(("gather",) if profile == "none" else ()))
