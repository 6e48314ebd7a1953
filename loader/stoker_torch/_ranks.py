"""The rank of a process, the comparison of settings between ranks, and checks of frameworks that shard data again.

Some training frameworks handle iterable data sets in a way that would lose samples silently. A DataLoader that Hugging
Face Accelerate has prepared (Trainer prepares its own) assumes that an ``IterableDataset`` is the same on every rank.
With ``dispatch_batches`` (the default for iterable data sets) only rank 0 reads it, and sends the other ranks their
parts; without it, every rank reads everything and keeps each ``world_size``-th batch. Of a data set that gives each
rank only its share, training would get only a share of the share.

Lightning and Trainer leave an epoch after ``len(DataLoader)`` batches. torch computes that from the length of the data
set, and does not count that each worker process ends with its own incomplete batch.

No framework is imported here: one that the process has not imported does nothing.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from stoker.errors import ConfigError, RankMismatchError

_REMEDY = (
    "construct the loader or data set when torch.distributed is initialized (under Lightning in train_dataloader()), "
    "or give it rank= and world_size="
)


def find_rank(rank: int | None, world_size: int | None, mesh: Any = None) -> tuple[int, int]:
    """Return rank and world size: as given, else the mesh's, torch.distributed's, ``RANK`` and ``WORLD_SIZE``, 0 of 1.

    Raises:
        ConfigError: only one of them is given, or both and a mesh, or the mesh has several dimensions, or the
            environment variables are not integers, or only one is set although there are several ranks.
    """
    if mesh is not None:
        return _find_rank_in_mesh(rank, world_size, mesh)
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank and world_size must be given together, not rank={rank} and world_size={world_size}")
    if rank is not None and world_size is not None:
        return rank, world_size
    if _is_distributed():
        return distributed.get_rank(), distributed.get_world_size()
    texts = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        ranks = int(texts[0]), int(texts[1])
    except ValueError:
        raise ConfigError(f"RANK and WORLD_SIZE must be integers, not {texts[0]!r} and {texts[1]!r}") from None
    if ranks[1] > 1 and "RANK" not in os.environ:  # as in the processes that Lightning starts
        raise ConfigError(f"WORLD_SIZE is {ranks[1]} and RANK is not set; {_REMEDY}")
    if ranks[0] > 0 and "WORLD_SIZE" not in os.environ:
        raise ConfigError(f"RANK is {ranks[0]} and WORLD_SIZE is not set; {_REMEDY}")
    return ranks


def _find_rank_in_mesh(rank: int | None, world_size: int | None, mesh: Any) -> tuple[int, int]:
    if rank is not None or world_size is not None:
        raise ConfigError(f"give mesh=, or rank= and world_size=, not both (rank={rank}, world_size={world_size})")
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {mesh!r:.80}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        first = "dp" if names is None else names[0]
        raise ConfigError(
            f"mesh must have one dimension, that of data parallelism, and this one has {mesh.ndim} "
            f"({'without names' if names is None else ', '.join(names)}): give mesh=device_mesh[{first!r}]"
        )
    return mesh.get_local_rank(), mesh.size()


def confirm_rank(rank: int, world_size: int) -> None:
    """Check that torch.distributed, if it was initialized after :func:`find_rank`, has the same rank and world size.

    Raises:
        ConfigError: it has not, so several ranks would read the same samples.
    """
    if _is_distributed() and (rank, world_size) != (distributed.get_rank(), distributed.get_world_size()):
        raise ConfigError(
            f"this was constructed as rank {rank} of {world_size}, but torch.distributed has rank "
            f"{distributed.get_rank()} of {distributed.get_world_size()}; {_REMEDY}"
        )


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def has_twins(world_size: int) -> bool:
    """Return whether other ranks get the same batches: there are more than the data set is divided among."""
    if _is_distributed():
        return distributed.get_world_size() > world_size
    text = os.environ.get("WORLD_SIZE", "1")  # of a spawned worker process
    return text.isdecimal() and int(text) > world_size


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or not int(ranks):
        raise ConfigError(
            f"LOCAL_WORLD_SIZE, which divides 'node:' sizes, must be an integer of at least 1, not {ranks!r}"
        )
    return int(ranks)


def local_rank(rank: int, ranks: int) -> int:
    """Return the number of a rank among the ranks of this machine."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() and int(local) < ranks else rank % ranks


def local_ranks(rank: int, world_size: int) -> range:
    """Return the ranks of this machine: launchers number them consecutively."""
    ranks = local_world_size()
    first = rank - local_rank(rank, ranks)
    return range(max(0, first), min(world_size, first + ranks))


def compare_ranks(settings: Mapping[str, object], world_size: int, mesh: Any = None) -> None:
    """Check that every rank has the same settings: a collective operation under torch.distributed, else no effect.

    The ranks, of the mesh if there is one, exchange only digests, in one tensor.

    Raises:
        RankMismatchError: settings differ (raised on every rank, with the names and this rank's values).
    """
    group = None if mesh is None else mesh.get_group()
    if not _is_distributed() or distributed.get_world_size(group) != world_size or world_size == 1:
        return
    digests = [
        int.from_bytes(hashlib.sha256(f"{name}={value!r}".encode()).digest()[:8], "little", signed=True)
        for name, value in settings.items()
    ]
    device = torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu")
    local = torch.tensor(digests, dtype=torch.int64, device=device)
    everyones = [torch.empty_like(local) for _ in range(world_size)]
    distributed.all_gather(everyones, local, group=group)
    agreed = (torch.stack(everyones) == everyones[0]).all(dim=0).tolist()
    different = [f"{name} (here {settings[name]!r})" for name, same in zip(settings, agreed, strict=True) if not same]
    if different:
        raise RankMismatchError(
            f"the ranks do not agree on {', '.join(different)}; construct every rank's Loader with the same arguments "
            "and load the same state"
        )


_LENGTH_FRAMEWORKS = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer")


def check_no_resharding(dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
    """Check that Accelerate does not divide the samples of ``dataset`` among the ranks again.

    Call it when an iteration begins: it examines the DataLoaders that Accelerate is iterating over, and the data sets
    inside them.

    Raises:
        ConfigError: samples would be lost; the message has the remedy.
    """
    for loader, sends_parts in _sharding_loaders():
        if not _wraps(loader.dataset, dataset):
            continue
        if world_size > 1:
            raise ConfigError(
                f"Accelerate prepared this DataLoader and divides its samples among the ranks, but its StreamDataset "
                f"is rank {rank} of {world_size} and has only that rank's share: the rest would be lost. Construct it "
                "with rank=0, world_size=1, or do not prepare the DataLoader (in a Trainer, override "
                "get_train_dataloader)"
            )
        if sends_parts and loader.use_stateful_dataloader:
            # Accelerate reads ahead for every rank, and corrects only its own count of batches (adjust_state_dict_…).
            raise ConfigError(
                "with dispatch_batches=True the state of this stateful DataLoader, which Accelerate prepared, would be "
                "ahead of the training, and samples would be lost; use dispatch_batches=False, or stoker_torch.Loader"
            )


def _sharding_loaders() -> Iterator[tuple[Any, bool]]:
    """Yield each DataLoader that Accelerate divides among the ranks, and whether rank 0 reads for all of them."""
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is None:
        return
    for loader in accelerate.GradientState().dataloader_references:
        sends_parts = isinstance(loader, accelerate.DataLoaderDispatcher) and loader.state.num_processes > 1
        if sends_parts or isinstance(getattr(loader, "dataset", None), accelerate.IterableDatasetShard):
            yield loader, sends_parts


def _wraps(outer: object, dataset: IterableDataset[Any]) -> bool:
    """Return whether ``outer`` is the data set or an iterable data set that wraps it."""
    if outer is dataset:
        return True
    return isinstance(outer, IterableDataset) and any(_wraps(each, dataset) for each in vars(outer).values())


def uses_loader_length() -> bool:
    """Return whether the process has imported a framework that leaves an epoch after ``len(DataLoader)`` batches."""
    return any(name in sys.modules for name in _LENGTH_FRAMEWORKS)


def warn_about_length(workers: int) -> None:
    """Warn that a DataLoader with several workers may have more batches than its ``len()``, which a framework uses."""
    warnings.warn(
        f"Lightning and Trainer leave an epoch after len(DataLoader) batches. {workers} workers read this "
        f"StreamDataset, and each ends with a batch of its own: up to {workers - 1} batches an epoch may be left out. "
        "Use at most one worker, or stoker_torch.Loader",
        stacklevel=2,
    )
