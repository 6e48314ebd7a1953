"""Shards: what they are called, how a wrong one is told from a right one, and what a node holds of them.

A shard comes with a keyed MAC, which only the proxy can make or check. It covers the shard's id, position and all. So
bytes that were damaged, cut or forged, and those of another shard, do not pass for it: a wrong shard is a lost one, and
the code restores lost ones.

A node's store holds shards within a budget of bytes; the least recently used go first.
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
"""Shards in one frame: their names take 48 KB of the 64 KiB that a head may have."""


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Which shard of which object. Ids are ordered by object, then by code and position.

    Attributes:
        object: the object's name, of :mod:`stoker._cache.index`.
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
    def code(self) -> ErasureCode:
        """How the object is cut."""
        return ErasureCode(self.data, self.parity)

    @property
    def size_bytes(self) -> int:
        """Of the shard: it follows from the object's name."""
        if self.position >= self.data:
            return self.code.shard_bytes(size_of(self.object))
        start, end = self.code.data_ranges(size_of(self.object))[self.position]
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
        match = _SHARD_ID_TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise WireError(f"{text!r:.80} is not the name of a shard")
        try:
            return cls(match[1], int(match[2]), int(match[3]), int(match[4]))
        except ConfigError as error:
            raise WireError(f"{text!r:.80} is not the name of a shard: {error}") from None

    @classmethod
    def parse_all(cls, texts: Any) -> list[ShardId]:
        """Return the ids of a list of texts, which a peer has sent.

        Raises:
            WireError: it is no list, has more than ``MAX_SHARDS_PER_FRAME``, or one of them is not the name of a shard.
        """
        if not isinstance(texts, list):
            raise WireError(f"{texts!r:.80} is not a list of the names of shards")
        if len(texts) > MAX_SHARDS_PER_FRAME:
            raise WireError(f"a list of shards has at most {MAX_SHARDS_PER_FRAME}")
        return [cls.parse(each) for each in texts]


def parse_page(name: str, head: Mapping[str, Any], previous: Sequence[ShardId], max_count: int) -> list[ShardId]:
    """Return the shards of an answer to INDEX, behind those of the answers before.

    Raises:
        WireError: it is no such answer, has shards out of their order, or is one too many.
    """
    shards = ShardId.parse_all(head.get("shards"))
    if head.get("more") and not shards:
        raise WireError(f"{name} lists no shards, and says that there are more")
    if any(one >= other for one, other in pairwise([*previous[-1:], *shards])):
        raise WireError(f"{name} lists shards that are not in their order")
    if len(previous) + len(shards) > max_count:
        raise WireError(f"{name} lists more than {max_count} shards")
    return shards


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it is kept and sent.

    Attributes:
        id: which it is.
        mac: what :meth:`ShardMac.sign` returned for it; who has no key cannot tell whether it is right.
        payload: its bytes.
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
    """Makes and checks the MACs of shards: GMAC by AES-256 (NIST SP 800-38D), of the id's text, a line feed, the bytes.

    A CRC is linear: whoever can change a shard can change it so that its CRC, and that of its object, stay as they
    were. A MAC takes the key. That is random, or follows from ``STOKER_TIER_SECRET``; nodes, and whoever carries their
    bytes, know neither: ``STOKER_WARM_SECRET``, by which they are admitted, is another secret.

    Each MAC has a random nonce of its own, for which a key is good for 2^32 MACs (section 8.3). With 12 shards an
    object these are 358 million objects put away; a tier that moves more needs another secret from then on.

    Args:
        key: 32 bytes that nodes do not have.

    Raises:
        ConfigError: the key has another length.
        MissingExtraError: the package that computes MACs is not installed.
    """

    def __init__(self, key: bytes) -> None:
        with require_extra("the proxy of a warm tier", "warm"):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a key of shards' MACs has {KEY_BYTES} bytes, not {len(key)}")
        self._aes, self._cipher, self._mode = algorithms.AES(key), Cipher, modes.GCM

    def sign(self, shard: ShardId, payload: bytes | bytearray | memoryview) -> str:
        """Return a MAC of a shard, another one each time."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return (nonce + self._tag(nonce, shard, payload)).hex()

    def verify(self, shard: ShardId, payload: bytes | bytearray | memoryview, mac: object) -> bool:
        """Return whether this is a MAC that was made for this shard with these bytes. Takes the same time for all."""
        if not is_mac(mac):
            return False
        stated = bytes.fromhex(mac)
        return hmac.compare_digest(stated[_NONCE_BYTES:], self._tag(stated[:_NONCE_BYTES], shard, payload))

    def _tag(self, nonce: bytes, shard: ShardId, payload: bytes | bytearray | memoryview) -> bytes:
        gmac = self._cipher(self._aes, self._mode(nonce)).encryptor()
        gmac.authenticate_additional_data(f"{shard.to_text()}\n".encode())  # the line feed ends the id
        gmac.authenticate_additional_data(payload)
        gmac.finalize()
        return gmac.tag

    def __repr__(self) -> str:
        return "ShardMac(…)"


SHARD_OVERHEAD_BYTES = 768
"""What a shard takes besides its payload, in the budget: a bound on what tracemalloc counts for the id with a name of
its own, its MAC, the record of both, its places in two tables, and the head of a bytearray."""


class StoreVersion(NamedTuple):
    """Version of the contents of a shard store, in two numbers.

    A node that still has what it had answers with the version that it answered with before. An instance that has just
    started says (0, 0), which no other store says: one that was emptied has counted that. A peer that missed changes
    has counted fewer; should it have counted as many others, the hashes differ, but for one time in 2^64. Two stores
    that came to the same contents in different ways have the same hash.

    Attributes:
        change_count: shards that were put into the store or went from it, ever.
        hash: 64 bits, of which shards with which MACs are there, whatever their order.
    """

    change_count: int = 0
    hash: int = 0


class ShardStore:
    """Shards in memory. It decides and never waits; not thread-safe.

    Invariant: payloads, and :data:`SHARD_OVERHEAD_BYTES` for each shard, never add up to more than the limit.

    A payload belongs to the store and is never changed. One that is evicted while it is being sent stays valid until
    then, outside the budget.

    Args:
        limit_bytes: of memory.

    Attributes:
        held_bytes: of the limit.
        version: of what is there.

    Raises:
        ConfigError: the limit is negative.
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
        """Put a shard into the store, in the place of the one with its id if there is one.

        Returns:
            What was evicted for it, in order; None if it is larger than the limit, and then nothing changed.
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
        """Return a shard, if it is there, and count this as a use of it."""
        shard = self._shards.get(shard_id)
        if shard is not None:
            self._shards.move_to_end(shard_id)
        return shard

    def delete(self, shard_id: ShardId) -> bool:
        """Take a shard from the store; return whether it was there."""
        shard = self._shards.pop(shard_id, None)
        if shard is None:
            return False
        self._update_totals(shard, -len(shard.payload) - SHARD_OVERHEAD_BYTES)
        return True

    def list_ids(self, after: ShardId | None = None, max_count: int | None = None) -> list[ShardId]:
        """Return which shards are there, in the order of ids. Is no use of them.

        Shards that come and go between pages move no others from one page to another.

        Args:
            after: those behind this id only: the last one of the page before, there or not.
            max_count: ids at most. Fewer are the last page.
        """
        behind = (each for each in self._shards if after is None or each > after)
        return sorted(behind) if max_count is None else nsmallest(max_count, behind)

    def _update_totals(self, shard: Shard, added_bytes: int) -> None:
        """Account for a shard that came or went. XOR adds it to the hash and takes it out again (Zobrist hashing)."""
        self.held_bytes += added_bytes
        content = f"{shard.id.to_text()} {shard.mac}".encode()
        mixed = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
        self.version = StoreVersion(self.version.change_count + 1, self.version.hash ^ mixed)

    def __repr__(self) -> str:
        held = f"{self.held_bytes} of {self.limit_bytes} bytes"
        return f"<ShardStore {len(self)} shards, {held}, term {self.version.change_count}>"
