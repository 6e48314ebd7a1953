"""Shards: their ids, their MACs, and a node's shard store.

A shard has a keyed MAC, which only the proxy can create or verify. The MAC covers the payload and the shard's id,
including its position. So damaged, truncated or forged bytes, and those of another shard, are detected: a wrong shard
counts as lost, and the erasure code restores it.

A node's store holds shards within a limit in bytes, and evicts the least recently used ones first.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

from stoker._base.plugins import require_extra
from stoker._cache.index import is_name, size_of
from stoker.errors import ConfigError, WireError
from stoker_warm._erasure import ErasureCode

_SHARD_ID_TEXT = re.compile(r"([0-9a-f]{32})\.([1-9]\d{0,2})\+(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})", re.ASCII)
MAX_SHARDS_PER_FRAME = 1000
"""Maximum number of shard ids in one frame: they take 48 KB, and a head has at most 64 KiB."""


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Id of a shard. Ids are ordered by object, then by code and position.

    Attributes:
        object: Name of the object; see :mod:`stoker._cache.index`.
        data: Number of the object's data shards.
        parity: Number of the object's parity shards.
        position: Position of the shard, from 0; positions from ``data`` on are parity shards.

    Raises:
        ConfigError: The name, the code or the position is invalid.
    """

    object: str
    data: int
    parity: int
    position: int

    def __post_init__(self) -> None:
        if not is_name(self.object):
            raise ConfigError(f"{self.object!r:.40} is not the name of an object: 32 hexadecimal digits")
        if not 0 <= self.position < self.code.shards:
            raise ConfigError(f"the code {self.code} has shards 0 to {self.code.shards - 1}, not {self.position}")

    @property
    def code(self) -> ErasureCode:
        """Erasure code of the object."""
        return ErasureCode(self.data, self.parity)

    @property
    def size_bytes(self) -> int:
        """Size of the shard in bytes, computed from the object's name."""
        if self.position >= self.data:
            return self.code.shard_bytes(size_of(self.object))
        start, end = self.code.data_ranges(size_of(self.object))[self.position]
        return end - start

    def to_text(self) -> str:
        """Return the id as text: ``<object>.10+2.7``."""
        return f"{self.object}.{self.data}+{self.parity}.{self.position}"

    @classmethod
    def parse(cls, text: Any) -> ShardId:
        """Parse an id that a peer has sent. Each id has exactly one text.

        Raises:
            WireError: The text is not one that :meth:`to_text` returns.
        """
        match = _SHARD_ID_TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise WireError(f"{text!r:.80} is not the name of a shard")
        try:
            return cls(match[1], int(match[2]), int(match[3]), int(match[4]))
        except ConfigError as error:
            raise WireError(f"{text!r:.80} is not the name of a shard: {error}") from None

    @classmethod
    def parse_all(cls, texts: Any) -> list[ShardId]:
        """Parse a list of ids that a peer has sent.

        Raises:
            WireError: The value is not a list, has more than ``MAX_SHARDS_PER_FRAME`` items, or an item is not an id.
        """
        if not isinstance(texts, list):
            raise WireError(f"{texts!r:.80} is not a list of the names of shards")
        if len(texts) > MAX_SHARDS_PER_FRAME:
            raise WireError(f"a list of shards must have at most {MAX_SHARDS_PER_FRAME}, not {len(texts)}")
        return [cls.parse(each) for each in texts]


def parse_page(name: str, head: Mapping[str, Any], previous: Sequence[ShardId], max_count: int) -> list[ShardId]:
    """Return the shards of an answer to INDEX, which follows the ``previous`` ones.

    Raises:
        WireError: The answer is malformed, its shards are not in ascending order, or there are over ``max_count``.
    """
    shards = ShardId.parse_all(head.get("shards"))
    if head.get("more") and not shards:
        raise WireError(f"{name} lists no shards, but announces more")
    if any(one >= other for one, other in pairwise([*previous[-1:], *shards])):
        raise WireError(f"{name} lists shards that are not in ascending order")
    if len(previous) + len(shards) > max_count:
        raise WireError(f"{name} lists more than {max_count} shards")
    return shards


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it is stored and sent.

    Attributes:
        id: Id of the shard.
        mac: MAC from :meth:`ShardMac.sign`; it cannot be verified without the key.
        payload: Bytes of the shard.
    """

    id: ShardId
    mac: str
    payload: bytes | bytearray | memoryview


KEY_BYTES = 32
_NONCE_BYTES = 12
_MAC = re.compile(r"[0-9a-f]{56}", re.ASCII)


def is_mac(value: object) -> TypeGuard[str]:
    """Return whether a value has the form of a shard's MAC: 12 bytes of nonce and 16 of tag, as hexadecimal digits."""
    return isinstance(value, str) and _MAC.fullmatch(value) is not None


class ShardMac:
    """Creates and verifies MACs of shards: AES-256-GMAC (NIST SP 800-38D) of the id's text, a line feed and the bytes.

    A CRC does not protect against forgery: it is linear, so a changed shard can keep its CRC and that of its object. A
    MAC needs the key, which is random or derived from ``STOKER_TIER_SECRET``. Nodes and networks know neither: nodes
    authenticate by another secret, ``STOKER_WARM_SECRET``.

    Each MAC has a random nonce, so a key may be used for at most 2^32 MACs (section 8.3). With 12 shards per object,
    that is 358 million written objects; a tier that writes more needs a new secret then.

    Args:
        key: 32 bytes that nodes do not know.

    Raises:
        ConfigError: The key has another length.
        MissingExtraError: The package that computes MACs is not installed.
    """

    def __init__(self, key: bytes) -> None:
        with require_extra("the proxy of a warm tier", "warm"):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        if len(key) != KEY_BYTES:
            raise ConfigError(f"the key for MACs of shards must have {KEY_BYTES} bytes, not {len(key)}")
        self._aes, self._cipher, self._mode = algorithms.AES(key), Cipher, modes.GCM

    def sign(self, shard: ShardId, payload: bytes | bytearray | memoryview) -> str:
        """Return a MAC of a shard, with a new random nonce."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return (nonce + self._tag(nonce, shard, payload)).hex()

    def verify(self, shard: ShardId, payload: bytes | bytearray | memoryview, mac: object) -> bool:
        """Return whether a MAC is valid for a shard with these bytes. The comparison takes constant time."""
        if not is_mac(mac):
            return False
        stated = bytes.fromhex(mac)
        return hmac.compare_digest(stated[_NONCE_BYTES:], self._tag(stated[:_NONCE_BYTES], shard, payload))

    def _tag(self, nonce: bytes, shard: ShardId, payload: bytes | bytearray | memoryview) -> bytes:
        gmac = self._cipher(self._aes, self._mode(nonce)).encryptor()
        gmac.authenticate_additional_data(f"{shard.to_text()}\n".encode())  # the line feed terminates the id
        gmac.authenticate_additional_data(payload)
        gmac.finalize()
        return gmac.tag

    def __repr__(self) -> str:
        return "ShardMac(…)"


SHARD_OVERHEAD_BYTES = 768
"""Bytes counted for a shard besides its payload: an upper bound, by tracemalloc, of its id with the object's name, its
MAC, its record, its entries in two tables, and the header of a bytearray."""


class StoreVersion(NamedTuple):
    """Version of the contents of a shard store: a change count and a hash.

    A node whose contents are unchanged reports the same version as before. Only an instance that has just started
    reports (0, 0): a store that was emptied has counted the changes. A peer that has missed changes has a smaller
    count; after the same number of different changes, the hashes differ, except with probability 2^-64. Stores with
    equal contents have equal hashes, however they were filled.

    Attributes:
        change_count: Number of shards ever added to or removed from the store.
        hash: 64-bit hash of the set of shard ids and MACs, independent of their order.
    """

    change_count: int = 0
    hash: int = 0


class ShardStore:
    """Shards in memory. It does no I/O and never waits; not thread-safe.

    Invariant: the sum of payloads, with :data:`SHARD_OVERHEAD_BYTES` for each shard, never exceeds the limit.

    The store owns the payloads, and never changes them. One that is evicted while it is sent stays valid, uncounted.

    Args:
        limit_bytes: Limit in bytes.

    Attributes:
        held_bytes: Bytes in use, including overhead.
        version: Version of the contents.

    Raises:
        ConfigError: The limit is negative.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ConfigError(f"a store's limit must be at least 0 bytes, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.version = StoreVersion()
        self._shards = OrderedDict[ShardId, Shard]()  # the least recently used first

    def __contains__(self, shard_id: ShardId) -> bool:
        return shard_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def set(self, shard_id: ShardId, mac: str, payload: bytes | bytearray) -> list[ShardId] | None:
        """Add a shard, or replace the one with the same id.

        Returns:
            The shards evicted for it, in order; None, with nothing changed, if it is larger than the limit.
        """
        taken_bytes = len(payload) + SHARD_OVERHEAD_BYTES
        if taken_bytes > self.limit_bytes:
            return None
        self.delete(shard_id)
        evicted = []
        while self.held_bytes + taken_bytes > self.limit_bytes:
            evicted.append(next(iter(self._shards)))
            self.delete(evicted[-1])
        shard = self._shards[shard_id] = Shard(shard_id, mac, payload)
        self._update_totals(shard, taken_bytes)
        return evicted

    def get(self, shard_id: ShardId) -> Shard | None:
        """Return a shard, or None, and mark it as most recently used."""
        shard = self._shards.get(shard_id)
        if shard is not None:
            self._shards.move_to_end(shard_id)
        return shard

    def delete(self, shard_id: ShardId) -> bool:
        """Remove a shard; return whether it was there."""
        shard = self._shards.pop(shard_id, None)
        if shard is None:
            return False
        self._update_totals(shard, -len(shard.payload) - SHARD_OVERHEAD_BYTES)
        return True

    def list_ids(self, after: ShardId | None = None, max_count: int | None = None) -> list[ShardId]:
        """Return a page of the shards' ids, in ascending order, without marking the shards as used.

        Shards that are added or removed between two pages do not move others from one page to another.

        Args:
            after: Lower bound, exclusive: the last id of the page before, even if that shard was removed since.
            max_count: Maximum number of ids. A page with fewer ids is the last one. None returns all.
        """
        behind = (each for each in self._shards if after is None or each > after)
        return sorted(behind) if max_count is None else nsmallest(max_count, behind)

    def _update_totals(self, shard: Shard, added_bytes: int) -> None:
        """Count an added or removed shard. XOR adds it to the hash, and removes it again (Zobrist hashing)."""
        self.held_bytes += added_bytes
        content = f"{shard.id.to_text()} {shard.mac}".encode()
        mixed = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
        self.version = StoreVersion(self.version.change_count + 1, self.version.hash ^ mixed)
