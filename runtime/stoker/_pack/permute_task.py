"""The tasks that permute the samples of a fan-out job, as events of the function ``pack``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stoker._base.fields import JsonFields
from stoker._format.pack_shuffle import PackShuffle
from stoker._format.supersample import FORMAT, MAX_TARGET_BYTES
from stoker._order.epoch_layout import MAX_SLICES
from stoker._pack.record import PackRecord
from stoker._pack.shuffle import Permutation

Step = Literal["scatter", "slice"]
_ID_PATTERN = "[0-9a-f]{16}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteTask:
    """One task, whose result is the same however often, and by however many processes at a time, it is executed.

    Attributes:
        dataset: URL of the data set.
        dataset_id: id of the data set, 16 hexadecimal digits.
        job: id of the fan-out job, whose work folder has the samples, 16 hexadecimal digits.
        seed: seed of the permutation.
        parts: number of slices.
        super_sample_bytes: maximum size of a super-sample's data, in bytes.
        step: ``scatter`` some of the super-samples to slices, or pack a ``slice``.
        part: number of the scatter or slice, from 0.
    """

    dataset: str
    dataset_id: str
    job: str
    seed: int
    parts: int
    super_sample_bytes: int
    step: Step
    part: int

    @property
    def run(self) -> str:
        """Id of the pack run of a slice, 16 hexadecimal digits."""
        return self._identity[:16]

    @property
    def _identity(self) -> str:
        """SHA-256 of a slice without the URL of its data set, 64 hexadecimal digits."""
        content = {name: value for name, value in self.to_event().items() if name != "dataset"}
        return hashlib.sha256(json.dumps([FORMAT, content], sort_keys=True).encode()).hexdigest()

    def record(self) -> PackRecord:
        """Return the initial record of a slice's run."""
        return PackRecord(
            run=self.run,
            identity=self._identity,
            source=f"slice {self.part} of a permutation",
            mode="deferred",
            job=self.job,
            shuffle=PackShuffle(self.seed, self.job),
        )

    @property
    def permutation(self) -> Permutation:
        """The permutation of the job."""
        return Permutation(pack=self.job, seed=self.seed, parts=self.parts, object_bytes=self.super_sample_bytes)

    def to_event(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return {
            "dataset": self.dataset,
            "dataset_id": self.dataset_id,
            "job": self.job,
            "super_sample_bytes": self.super_sample_bytes,
            "shuffle": {"seed": self.seed, "parts": self.parts, "step": self.step, "part": self.part},
        }

    @classmethod
    def from_event(cls, event: object) -> PermuteTask:
        """Return the task of an event.

        Raises:
            EventError: the event is not a task; the message names the field.
        """
        fields = JsonFields(event, "pack event")
        shuffle = fields.nested("shuffle")
        parts = shuffle.integer("parts", min_value=1, max_value=MAX_SLICES)
        step: Any = shuffle.choice("step", get_args(Step))
        task = cls(
            dataset=fields.text("dataset"),
            dataset_id=fields.text("dataset_id", pattern=_ID_PATTERN),
            job=fields.text("job", pattern=_ID_PATTERN),
            seed=shuffle.integer("seed", max_value=(1 << 64) - 1),
            parts=parts,
            super_sample_bytes=fields.integer("super_sample_bytes", min_value=1, max_value=MAX_TARGET_BYTES),
            step=step,
            part=shuffle.integer("part", max_value=parts - 1),
        )
        shuffle.check_no_fields_left()
        fields.check_no_fields_left()
        return task
