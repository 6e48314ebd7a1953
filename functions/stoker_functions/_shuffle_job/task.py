"""The tasks of which a materialized epoch is made, as events that a function takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stoker._base.fields import Fields
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._order.materialized_layout import MAX_EPOCH, MAX_SLICES
from stoker._order.order import MAX_LANES
from stoker.errors import ConfigError

__all__ = ["ShuffleTask", "Step", "Way"]

Step = Literal["scatter", "slice", "commit"]
Way = Literal["ranged", "streamed", "scattered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleTask:
    """One task. Whoever carries it out, how often, and at the same time as whom, makes no difference to its result.

    Attributes:
        dataset: URL of the data set.
        version: of its manifest.
        seed: of the order.
        epoch: from 0.
        lanes: into how many parts the epoch is cut.
        way: how a slice reads: by ranges, all super-samples streamed past, or what was scattered before.
        slices: into how many parts the epoch is cut to be written.
        scatters: into how many parts the super-samples are cut to be scattered; 0 but for the way ``scattered``.
        object_bytes: limit of a super-sample's data that is written.
        step: ``scatter`` some super-samples to slices, write a ``slice``, or ``commit`` what all slices have written.
        part: which scatter or slice; 0 for a commit.
        keep: commits keep so many epochs of the run before this one, and delete older ones; by default they keep all.

    Raises:
        ConfigError: values do not go together.
    """

    dataset: str
    version: int
    seed: int
    epoch: int
    lanes: int
    way: Way
    slices: int
    scatters: int
    object_bytes: int
    step: Step
    part: int
    keep: int = MAX_EPOCH

    def __post_init__(self) -> None:
        if (self.way == "scattered") != (self.scatters > 0):
            raise ConfigError(f"the way {self.way!r} does not go with {self.scatters} scatters")
        parts = {"scatter": self.scatters, "slice": self.slices, "commit": 1}[self.step]
        if not 0 <= self.part < parts:
            raise ConfigError(f"part {self.part} is not in [0, {parts}), of which a {self.step} is one")

    def to_event(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return asdict(self)

    @classmethod
    def from_event(cls, event: object) -> ShuffleTask:
        """Return the task that an event asks for.

        Raises:
            EventError: it is not one; names the field.
            ConfigError: its values do not go together.
        """
        fields = Fields(event, "shuffle event")
        values: Mapping[str, Any] = {
            "dataset": fields.text("dataset"),
            "version": fields.integer("version", least=1),
            "seed": fields.integer("seed", most=(1 << 64) - 1),
            "epoch": fields.integer("epoch", most=MAX_EPOCH),
            "lanes": fields.integer("lanes", least=1, most=MAX_LANES),
            "way": fields.choice("way", get_args(Way)),
            "slices": fields.integer("slices", least=1, most=MAX_SLICES),
            "scatters": fields.integer("scatters", most=MAX_SLICES, default=0),
            "object_bytes": fields.integer("object_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES),
            "step": fields.choice("step", get_args(Step)),
            "part": fields.integer("part", most=MAX_SLICES, default=0),
            "keep": fields.integer("keep", most=MAX_EPOCH, default=MAX_EPOCH),
        }
        fields.end()
        return cls(**values)
