"""What training from a packed data set asks of its bucket, known from the manifest alone."""

from __future__ import annotations

from stoker._base.operations import Egress, Operation
from stoker._cost.usage import Traffic
from stoker._pack.record import record_writes
from stoker.errors import ConfigError

__all__ = ["packing_traffic", "training_traffic"]

_MANIFESTS, _TRIALS = 2, 1
"""The manifest and its copy; and the write that a store must refuse if it honours conditions."""


def training_traffic(
    super_samples: int,
    size_bytes: int,
    *,
    epochs: int,
    ranks: int,
    hit_rate: float = 0.0,
    egress: Egress = "same_region",
) -> Traffic:
    """Return the requests of a run whose super-samples are read whole.

    An epoch reads every super-sample once, and those that the order cuts between two ranks twice. Retries and hedges
    are not counted; start-up never lists.

    Args:
        super_samples: of the data set.
        size_bytes: of them all.
        epochs: how many.
        ranks: that share each epoch; each reads the manifest once.
        hit_rate: of look-ups behind the first epoch, that a cache answers.
        egress: where the ranks are.

    Raises:
        ConfigError: a figure cannot be.
    """
    if min(epochs, ranks) < 1 or not 0 <= hit_rate <= 1:
        raise ConfigError(f"epochs {epochs} and ranks {ranks} are at least 1, and hit_rate {hit_rate} is from 0 to 1")
    reads = super_samples + (min(ranks, super_samples) - 1 if super_samples else 0)
    times = 1 + (epochs - 1) * (1 - hit_rate)
    mean_bytes = size_bytes / max(1, super_samples)
    return Traffic(
        requests={Operation.GET: ranks + reads * times}, read_bytes=reads * mean_bytes * times, egress=egress
    )


def packing_traffic(super_samples: int, size_bytes: int, *, egress: Egress = "same_region") -> Traffic:
    """Return the writes that make a data set in one run: super-samples, pack records, the manifest and its copy.

    Uploads that end at the same time share a record, so there may be fewer of these.
    """
    writes = super_samples + record_writes(super_samples) + _MANIFESTS + _TRIALS
    return Traffic(requests={Operation.PUT: writes}, written_bytes=size_bytes, egress=egress)
