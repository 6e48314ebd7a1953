"""Which rank this is, and whether all ranks mean the same run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import distributed

from stoker.errors import ConfigError, RankMismatchError

__all__ = ["compare_ranks", "confirm_rank", "find_rank"]

_REMEDY = (
    "make it when torch.distributed is initialized (under Lightning in train_dataloader()), or give it rank= and "
    "world_size="
)


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else torch.distributed's, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1.

    Raises:
        ConfigError: only one of them is given, the environment's are not numbers, or it has several ranks and does not
            say which this is.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank {rank} and world_size {world_size} go together: give both or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if _is_distributed():
        return distributed.get_rank(), distributed.get_world_size()
    texts = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        found = int(texts[0]), int(texts[1])
    except ValueError:
        raise ConfigError(f"RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r} are not both numbers") from None
    if found[1] > 1 and "RANK" not in os.environ:  # as in the processes that Lightning starts
        raise ConfigError(f"WORLD_SIZE is {found[1]} and RANK is not set; {_REMEDY}")
    return found


def confirm_rank(rank: int, world_size: int) -> None:
    """Check that torch.distributed, if it was initialized since :func:`find_rank`, says what was found then.

    Raises:
        ConfigError: it does not; ranks would read what others read, too.
    """
    if _is_distributed() and (rank, world_size) != (distributed.get_rank(), distributed.get_world_size()):
        raise ConfigError(
            f"this was made as rank {rank} of {world_size}, and torch.distributed says rank {distributed.get_rank()} "
            f"of {distributed.get_world_size()}; {_REMEDY}"
        )


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def compare_ranks(settings: Mapping[str, object], world_size: int) -> None:
    """Check that every rank has the same settings; a collective operation under torch.distributed, else nothing.

    Only digests travel, as a tensor.

    Raises:
        RankMismatchError: on every rank, naming the settings that differ and this rank's values.
    """
    if not _is_distributed() or distributed.get_world_size() != world_size or world_size == 1:
        return
    digests = [
        int.from_bytes(hashlib.sha256(f"{name}={value!r}".encode()).digest()[:8], "little", signed=True)
        for name, value in settings.items()
    ]
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    distributed.all_gather(everyones, mine)
    agreed = (torch.stack(everyones) == everyones[0]).all(dim=0).tolist()
    different = [f"{name} (here {settings[name]!r})" for name, same in zip(settings, agreed, strict=True) if not same]
    if different:
        raise RankMismatchError(
            f"the ranks do not agree on {', '.join(different)}; construct every rank's Loader with the same arguments "
            "and load the same state"
        )
