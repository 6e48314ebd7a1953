"""Cutting a stream of samples into super-samples: pure, and always at the same places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker._format.schema import Schema
from stoker._format.supersample import Origin, Packed, SuperSampleBuilder
from stoker.errors import PackError

__all__ = ["Cut", "Cutter"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One finished super-sample.

    Attributes:
        data: the object's bytes.
        packed: what a manifest must know of it.
    """

    data: bytes
    packed: Packed


class Cutter:
    """Collects samples and cuts a super-sample off when the next sample would make it too large.

    Where it cuts depends on the samples' sizes alone, so the same samples give the same objects, byte for byte.

    Args:
        schema: the columns of every sample.
        super_sample_bytes: limit of a super-sample's data section; its header comes on top.
        dataset: id of the data set.
        run: id of the pack run.
    """

    def __init__(self, schema: Schema, super_sample_bytes: int, *, dataset: str, run: str) -> None:
        self._builder = SuperSampleBuilder(schema)
        self._super_sample_bytes = super_sample_bytes
        self._dataset = dataset
        self._run = run
        self.samples = 0
        self.objects = 0

    def skip(self, objects: int, samples: int) -> None:
        """Go on as if that many more super-samples with that many samples in all had been cut.

        Raises:
            PackError: a super-sample is under construction.
        """
        if len(self._builder):
            raise PackError(f"cannot skip after sample {self.samples}, in the middle of a super-sample")
        self.objects += objects
        self.samples += samples

    def add(self, sample: Mapping[str, object], where: str = "") -> Cut | None:
        """Take one sample; return the super-sample that ended before it, if one did.

        Args:
            sample: column name → value.
            where: what to call the sample in an error beside its number, such as the file that it came from.

        Raises:
            SchemaError: the sample does not fit the schema; it was not taken.
            PackError: the sample alone is larger than a super-sample; it was not taken.
        """
        name = f"sample {self.samples}" + (f" ({where})" if where else "")
        return self.add_encoded(self._builder.schema.encode(sample, name), name)

    def add_encoded(self, values: list[bytes], name: str) -> Cut | None:
        """Take one sample as :meth:`Schema.encode` gives it, called ``name`` in an error; else like :meth:`add`."""
        cut = None
        if self._builder.size_with(values) > self._super_sample_bytes:
            self._check_fits(values, name)
            cut = self._cut(is_last=False)
        self._builder.add(values)
        self.samples += 1
        return cut

    def finish(self) -> Cut | None:
        """Return the run's last super-sample, the one under construction; None if there is no sample."""
        return self._cut(is_last=True) if len(self._builder) else None

    def _cut(self, *, is_last: bool) -> Cut:
        origin = Origin(dataset=self._dataset, run=self._run, ordinal=self.objects)
        data, packed = self._builder.finish(origin, is_last=is_last)
        self.objects += 1
        return Cut(data, packed)

    def _check_fits(self, values: list[bytes], name: str) -> None:
        alone = SuperSampleBuilder(self._builder.schema).size_with(values)
        if alone > self._super_sample_bytes:
            sizes = dict(zip(self._builder.schema, map(len, values), strict=True))
            largest = max(sizes, key=sizes.__getitem__)
            raise PackError(
                f"{name} needs {alone} bytes ({sizes[largest]} of them in column {largest!r}), more than a "
                f"super-sample of {self._super_sample_bytes}; raise super_sample_bytes= or make the sample smaller"
            )
