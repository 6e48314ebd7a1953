"""Frameworks that deal samples to the ranks by themselves: a data set that is dealt already would be dealt twice.

A DataLoader that Hugging Face Accelerate has prepared, and Trainer prepares its own, treats an ``IterableDataset`` as
one that is the same on every rank. With ``dispatch_batches`` (the default for such) rank 0 alone reads it and sends the
others their parts; without it every rank reads all and keeps the batches whose turn it is. Of a data set that gives
each rank its share, only a share of the share would be seen, and the rest lost without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from stoker.errors import ConfigError

__all__ = ["refuse_resharding"]


def refuse_resharding(dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
    """Check that nobody deals out the samples of ``dataset``, which are one rank's, again.

    To be called where an iteration begins: it looks at the DataLoaders that Accelerate is iterating over, and at the
    data sets that these read through. Nothing is imported, and it costs nothing without Accelerate.

    Raises:
        ConfigError: Accelerate does; says what to write instead.
    """
    if world_size > 1 and any(_reads(each, dataset) for each in _dealt()):
        raise ConfigError(
            f"this DataLoader was prepared by Accelerate, which deals samples to the ranks, and its StreamDataset is "
            f"rank {rank} of {world_size} and has only its share of them: the rest would be lost. Construct it with "
            "rank=0, world_size=1, or do not prepare the DataLoader (in a Trainer, override get_train_dataloader)"
        )


def _dealt() -> Iterator[object]:
    """Yield the data sets whose samples Accelerate is dealing to several ranks."""
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is None:
        return
    for loader in accelerate.GradientState().dataloader_references:
        data = getattr(loader, "dataset", None)
        sends_parts = isinstance(loader, accelerate.DataLoaderDispatcher) and loader.state.num_processes > 1
        if sends_parts or isinstance(data, accelerate.IterableDatasetShard):
            yield data


def _reads(outer: object, dataset: IterableDataset[Any]) -> bool:
    """Return whether ``outer`` is the data set, or an iterable one around it."""
    if outer is dataset:
        return True
    return isinstance(outer, IterableDataset) and any(_reads(each, dataset) for each in vars(outer).values())
