"""One pack run in memory: its plan, its cutter, its record, and the rules that hold between them."""

from __future__ import annotations

from dataclasses import replace

from stoker.errors import DatasetExistsError, PackError
from stoker.manifest import Manifest, PackRun, Rows
from stoker.pack.cutter import Cutter
from stoker.pack.log import Journal
from stoker.pack.plan import PackConfig, PackPlan
from stoker.supersample import Packed

__all__ = ["PackRunner", "source_changed"]

_RECORD_EVERY_OBJECTS = 8
_RECORD_EVERY_FRACTION = 16


class PackRunner:
    """The run that a packer carries out: its plan, its cutter, its record, and the rules that hold between them."""

    def __init__(self, config: PackConfig, plan: PackPlan, journal: Journal) -> None:
        self.plan = plan
        self._config = config
        self._journal = journal
        self.cutter = Cutter(config.schema, config.super_sample_bytes, dataset=plan.dataset, run=plan.record.run)
        prefix = plan.record.prefix
        self.durable = [] if prefix is None else [prefix.rows.packed(row, row) for row in range(len(prefix))]

    def replayed(self, packed: Packed) -> Packed:
        """Return the durable super-sample that ``packed`` is again.

        Raises:
            PackError: it is another one.
        """
        durable = self.durable[packed.ordinal]
        if replace(packed, tag=durable.tag) != durable:
            raise source_changed(f"super-sample {packed.ordinal}, before sample {self.cutter.samples}, differs")
        return durable

    def check_open(self) -> None:
        """Raise PackError if the run had come to the end of its source: then there is nothing to add to it."""
        if self.plan.record.state != "packing":
            raise source_changed(f"it has more than its {self.plan.record.samples} samples")

    def check_reached(self, objects: int) -> None:
        """Raise PackError if the source ended before the durable prefix did."""
        if objects < len(self.durable):
            ended, packed = self.cutter.samples, self.plan.record.samples
            raise source_changed(f"it ended after {ended} samples, but {packed} were packed before")

    def is_record_due(self, objects: int) -> bool:
        """Return whether the durable prefix has grown enough to be recorded."""
        recorded = len(self._journal)
        return objects - recorded >= max(_RECORD_EVERY_OBJECTS, recorded // _RECORD_EVERY_FRACTION)

    async def save(self, packed: list[Packed], state: str, version: int = 0) -> None:
        """Record that the run has come this far."""
        prefix = self._manifest(packed) if packed else None
        await self._journal.save(replace(self.plan.record, state=state, version=version, prefix=prefix))

    def built(self, base: Manifest | None, packed: list[Packed], url: str) -> Manifest:
        """Return the version that follows ``base``: with the run, for :func:`stoker.versions.commit`."""
        record = self.plan.record
        if base is not None and any(run.run == record.run for run in base.runs):
            if self.plan.is_in_manifest:
                return base
            kind = DatasetExistsError if record.mode == "create" else PackError
            raise kind(f"another process packed the same source to {url} at the same time; nothing was committed twice")
        if record.mode == "create":
            if base is not None:
                raise DatasetExistsError(
                    f"another process created a data set at {url} first; add to it with mode='append' "
                    "(stoker pack --append)"
                )
            return self._manifest(packed)
        if base is None or base.dataset != self.plan.dataset:
            raise PackError(f"the data set at {url} was deleted while samples were packed to append to it")
        return base.extended(Rows.of(packed), PackRun(record.run, 0, len(packed)))

    def _manifest(self, packed: list[Packed]) -> Manifest:
        return Manifest(
            dataset=self.plan.dataset,
            version=1,
            schema=self._config.schema,
            rows=Rows.of(packed),
            runs=(PackRun(self.plan.record.run, 0, len(packed)),),
        )


def source_changed(what: str) -> PackError:
    """Return the error that says how a source differs from the one that a resumed pack began with."""
    return PackError(
        f"the source is not the one that the unfinished pack began with: {what}; pack the original again to resume, "
        "or give this one its own name with source=, or delete the unfinished pack with: stoker gc --abandoned --delete"
    )
