"""Shards: what they are called, and how one that is not what its name says becomes an erasure.

A shard's checksum covers its name, too, position and all. So bytes that are whole, but those of another shard, do not
pass for it: a damaged, cut or mistaken shard is a lost one, and the code restores lost ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stoker._base.checksum import crc32c
from stoker._cache.naming import is_name, size_of
from stoker.errors import ConfigError, WireError
from stoker_warm._code import Code

__all__ = ["Shard", "ShardId", "verified"]

_TEXT = re.compile(r"([0-9a-f]{32})\.([1-9]\d{0,2})\+(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Which shard of which object. Ids are ordered by object, then by code and position.

    Attributes:
        object: the object's name, of :mod:`stoker._cache.naming`.
        data: shards that restore it.
        parity: shards besides.
        position: of the shard, from 0; those from ``data`` on are parity.

    Raises:
        ConfigError: the name is no object's, there is no such code, or the code has no such position.
    """

    object: str
    data: int
    parity: int
    position: int

    def __post_init__(self) -> None:
        if not is_name(self.object):
            raise ConfigError(f"{self.object!r:.40} is not the name of an object: 32 hexadecimal digits")
        if not 0 <= self.position < self.code.shards:
            raise ConfigError(f"{self.code} has shards 0 to {self.code.shards - 1}, not {self.position}")

    @property
    def code(self) -> Code:
        """How the object is cut."""
        return Code(self.data, self.parity)

    @property
    def size_bytes(self) -> int:
        """Of the shard: it follows from the object's name."""
        if self.position >= self.data:
            return self.code.shard_bytes(size_of(self.object))
        start, end = self.code.cuts(size_of(self.object))[self.position]
        return end - start

    def to_text(self) -> str:
        """Return the id as a text: ``<object>.10+2.7``."""
        return f"{self.object}.{self.data}+{self.parity}.{self.position}"

    @classmethod
    def parse(cls, text: Any) -> ShardId:
        """Return the id of a text, which a peer has sent. There is one text for each id.

        Raises:
            WireError: it is not exactly what :meth:`to_text` returns for some id.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise WireError(f"{text!r:.80} is not the name of a shard")
        try:
            return cls(match[1], int(match[2]), int(match[3]), int(match[4]))
        except ConfigError as error:
            raise WireError(f"{text!r:.80} is not the name of a shard: {error}") from None

    def checksum(self, payload: bytes | bytearray | memoryview) -> int:
        """Return the CRC-32C of the id's text with the payload behind it."""
        return crc32c(payload, crc32c(self.to_text().encode()))


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it is kept and sent.

    Attributes:
        id: which it is.
        crc32c: what :meth:`ShardId.checksum` was when it was made.
        payload: its bytes.
    """

    id: ShardId
    crc32c: int
    payload: bytes | bytearray | memoryview

    @property
    def is_whole(self) -> bool:
        """Whether the payload has the length and the checksum that it should."""
        return len(self.payload) == self.id.size_bytes and self.id.checksum(self.payload) == self.crc32c


def verified(shards: Iterable[Shard]) -> dict[int, memoryview]:
    """Return position → payload of the shards that are whole; the others are erasures."""
    return {shard.id.position: memoryview(shard.payload) for shard in shards if shard.is_whole}
