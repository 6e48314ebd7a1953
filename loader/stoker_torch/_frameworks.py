"""What training frameworks do to an iterable data set that would lose samples without a word.

A DataLoader that Hugging Face Accelerate has prepared, and Trainer prepares its own, treats an ``IterableDataset`` as
one that is the same on every rank. With ``dispatch_batches`` (the default for such) rank 0 alone reads it and sends the
others their parts; without it every rank reads all and keeps the batches whose turn it is. Of a data set that gives
each rank its share, only a share of the share would be seen.

Lightning and Trainer leave an epoch after ``len(DataLoader)`` batches. torch takes that from the length of the data set
and does not count that each worker process ends with a batch of its own.

Nothing is imported here: a framework that is not there does nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from stoker.errors import ConfigError

__all__ = ["refuse_resharding", "trusts_length", "warn_of_length"]

_TRUST_LENGTH = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer")


def refuse_resharding(dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
    """Check that nobody deals out the samples of ``dataset`` in a way that loses some.

    To be called where an iteration begins: it looks at the DataLoaders that Accelerate is iterating over, and at the
    data sets that these read through.

    Raises:
        ConfigError: Accelerate does; says what to write instead.
    """
    for loader, sends_parts in _dealing():
        if not _reads(loader.dataset, dataset):
            continue
        if world_size > 1:
            raise ConfigError(
                f"this DataLoader was prepared by Accelerate, which deals samples to the ranks, and its StreamDataset "
                f"is rank {rank} of {world_size} and has only its share of them: the rest would be lost. Construct it "
                "with rank=0, world_size=1, or do not prepare the DataLoader (in a Trainer, override "
                "get_train_dataloader)"
            )
        if sends_parts and loader.use_stateful_dataloader:
            # It takes batches for every rank ahead, and corrects only its own count of them (adjust_state_dict_…).
            raise ConfigError(
                "with dispatch_batches=True the state of this stateful DataLoader, which Accelerate prepared, would be "
                "ahead of the training, and what lies between lost; use dispatch_batches=False, or stoker_torch.Loader"
            )


def _dealing() -> Iterator[tuple[Any, bool]]:
    """Yield the DataLoaders with which Accelerate is dealing to several ranks, and whether rank 0 sends the others'."""
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is None:
        return
    for loader in accelerate.GradientState().dataloader_references:
        sends_parts = isinstance(loader, accelerate.DataLoaderDispatcher) and loader.state.num_processes > 1
        if sends_parts or isinstance(getattr(loader, "dataset", None), accelerate.IterableDatasetShard):
            yield loader, sends_parts


def _reads(outer: object, dataset: IterableDataset[Any]) -> bool:
    """Return whether ``outer`` is the data set, or an iterable one around it."""
    if outer is dataset:
        return True
    return isinstance(outer, IterableDataset) and any(_reads(each, dataset) for each in vars(outer).values())


def trusts_length() -> bool:
    """Return whether a framework is loaded that leaves an epoch after ``len(DataLoader)`` batches."""
    return any(name in sys.modules for name in _TRUST_LENGTH)


def warn_of_length(workers: int) -> None:
    """Warn that a DataLoader with several workers may have more batches than its ``len()``, which is trusted."""
    warnings.warn(
        f"Lightning and Trainer leave an epoch after len(DataLoader) batches. {workers} workers read this "
        f"StreamDataset, and each ends with a batch of its own: up to {workers - 1} batches an epoch may be left out. "
        "Use at most one worker, or stoker_torch.Loader",
        stacklevel=2,
    )
