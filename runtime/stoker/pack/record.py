"""The pack record: what is known of one pack run, to resume it after a kill, or to recover it without a manifest.

A safetensors file. Its one tensor, ``prefix``, is the manifest of the super-samples that are durable without a gap from
the first: empty before there is one. The metadata tells whose they are and how far the run has come. A record is
written before the first object of its run, so an object without a record belongs to nobody.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stoker import tensorfile
from stoker.checksum import crc32c
from stoker.dtypes import DTYPES
from stoker.errors import ChecksumError, FormatError
from stoker.manifest import Manifest
from stoker.supersample import FORMAT

__all__ = ["STATES", "PackRecord", "record_key", "run_id", "run_prefix"]

STATES = ("packing", "complete", "committed")
MODES = ("create", "append")
_VERSION = re.compile(r"[0-9]{1,9}", re.ASCII)
_IDENTITY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_RUN = re.compile(r"[0-9a-f]{16}", re.ASCII)


def record_key(run: str) -> str:
    """Return the key of a run's record."""
    return f"packs/{run}.safetensors"


def run_prefix(identity: str) -> str:
    """Return what the ids of all runs that pack the same thing begin with."""
    return identity[:8]


def run_id(identity: str, base_version: int) -> str:
    """Return the id of the run that packs ``identity`` on top of a version of the data set (0: there is none).

    The same again on top of the same version is the same run, so it writes the same objects to the same keys.
    """
    return run_prefix(identity) + hashlib.sha256(f"{identity} {base_version}".encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackRecord:
    """How far one pack run has come.

    Attributes:
        run: its id, 16 hexadecimal digits.
        identity: SHA-256 of what is packed, 64 hexadecimal digits.
        source: what the user, or the source itself, calls what is packed; for messages.
        mode: ``create`` or ``append``.
        state: ``packing``; ``complete``: the source has ended and all of it is durable; or ``committed``.
        version: of the manifest that has the run, 0 until it is committed.
        prefix: its durable super-samples, from number 0, as a manifest of their own; None before the first.
    """

    run: str
    identity: str
    source: str
    mode: str
    state: str = "packing"
    version: int = 0
    prefix: Manifest | None = None

    def __len__(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)

    @property
    def samples(self) -> int:
        """How many samples the prefix has."""
        return 0 if self.prefix is None else self.prefix.samples

    @property
    def is_committed(self) -> bool:
        """Whether a manifest has the run."""
        return self.state == "committed"

    @property
    def progress(self) -> tuple[int, int]:
        """What only grows: two records of a run compare by it."""
        return STATES.index(self.state), len(self)

    def to_bytes(self) -> bytes:
        """Return the record as a safetensors file; the same record gives the same bytes everywhere."""
        data = b"" if self.prefix is None else self.prefix.to_bytes()
        metadata = {
            "stoker_pack": FORMAT,
            "run": self.run,
            "identity": self.identity,
            "source": self.source,
            "mode": self.mode,
            "state": self.state,
            "version": str(self.version),
        }
        metadata["crc32c"] = _checksum(metadata, data)
        return tensorfile.encode_header(metadata, _tensors(len(data))) + data

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> PackRecord:
        """Return the record whose file is ``data``; the prefix's arrays are views of it.

        Raises:
            FormatError: the bytes are not a pack record.
            ChecksumError: they were one and are damaged.
        """
        header = tensorfile.parse_header(data, len(data))
        metadata = header.metadata
        if metadata.get("stoker_pack") != FORMAT:
            raise FormatError("this is not a pack record of a format that this version reads; a newer stoker may")
        content = memoryview(data)[header.header_bytes :]
        if header.tensors != _tensors(len(content)):
            raise FormatError("the pack record does not have exactly one tensor of bytes, 'prefix'")
        if metadata.get("crc32c") != _checksum(metadata, content):
            raise ChecksumError("the pack record is damaged: its checksum differs")
        try:
            record = cls(
                run=_matched(_RUN, metadata["run"]),
                identity=_matched(_IDENTITY, metadata["identity"]),
                source=metadata["source"],
                mode=metadata["mode"],
                state=metadata["state"],
                version=int(_matched(_VERSION, metadata["version"])),
                prefix=Manifest.from_bytes(content) if len(content) else None,
            )
        except KeyError as error:
            raise FormatError(f"the pack record has no {error}") from None
        record._check()
        return record

    def _check(self) -> None:
        if self.state not in STATES or self.mode not in MODES or self.is_committed != (self.version > 0):
            raise FormatError("the pack record's mode, state and version do not go together")
        runs = [] if self.prefix is None else [(run.run, run.first_number) for run in self.prefix.runs]
        if runs != ([(self.run, 0)] if len(self) else []) or (self.state != "packing" and not len(self)):
            raise FormatError("the pack record's prefix is not that of its run")


def _tensors(data_bytes: int) -> tuple[tensorfile.Tensor, ...]:
    return tensorfile.laid_out([("prefix", DTYPES["uint8"], (data_bytes,))])


def _checksum(metadata: Mapping[str, str], data: bytes | memoryview) -> str:
    said = json.dumps({name: metadata[name] for name in sorted(metadata) if name != "crc32c"}).encode()
    return f"{crc32c(data, crc32c(said)):08x}"


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise FormatError(f"the pack record has {text[:80]!r} for {pattern.pattern}")
    return text
