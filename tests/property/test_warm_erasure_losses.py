"""Any code, any object, any losses and any damage: the right bytes come back, or a typed error."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker._cache.index import name_of
from stoker.abc import ObjectRef
from stoker.errors import LostShardsError
from stoker_warm._erasure import ErasureCode, encode, restore
from stoker_warm._shard import Shard, ShardId
from support.warm_platform import MAC

MARGIN = b"\x55" * 5

codes = st.builds(ErasureCode, st.integers(1, 12), st.sampled_from([0, 1, 1, 2, 2, 2, 3, 5]))
objects = st.one_of(
    st.binary(max_size=40), st.integers(0, 5000).map(lambda size: bytes(i * i % 251 for i in range(size)))
)
DAMAGES = ("none", "lost", "flipped", "cut", "long", "of its neighbour", "other mac")
damages = st.lists(st.sampled_from(DAMAGES), max_size=6)


def shards_of(data: bytes, code: ErasureCode) -> list[Shard]:
    name = name_of(ObjectRef(key="k", size_bytes=len(data), crc32c=1))
    parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
    encode(memoryview(data), code, parity)
    payloads = [memoryview(data)[start:end] for start, end in code.data_ranges(len(data))] + parity
    ids = [ShardId(name, code.data, code.parity, position) for position in range(code.shards)]
    return [Shard(each, MAC.sign(each, payload), payload) for each, payload in zip(ids, payloads, strict=True)]


def damaged(shards: list[Shard], position: int, damage: str) -> Shard | None:
    """Return what a reader gets of a shard."""
    shard = shards[position]
    payload = bytearray(shard.payload)
    match damage:
        case "lost":
            return None
        case "flipped" if payload:
            payload[len(payload) // 2] ^= 1 + position % 255
        case "cut" if payload:
            del payload[-1]
        case "long":
            payload += b"\0"
        case "of its neighbour":
            neighbour = shards[position - 1]
            return replace(neighbour, id=shard.id)
        case "other mac":
            return replace(shard, mac=shards[position - 1].mac)
    return replace(shard, payload=payload)


@settings(max_examples=1000)
@given(codes, objects, damages, st.randoms(use_true_random=False))
def test_what_is_not_damaged_restores_an_object_or_it_is_lost(
    code: ErasureCode, data: bytes, chosen: list[str], rng: Random
) -> None:
    shards = shards_of(data, code)
    dealt = (chosen + ["none"] * code.shards)[: code.shards]
    rng.shuffle(dealt)
    came = [damaged(shards, position, damage) for position, damage in enumerate(dealt)]
    whole = [shard for shard in came if shard is not None and MAC.verify(shard.id, shard.payload, shard.mac)]
    found = {shard.id.position: memoryview(shard.payload) for shard in whole}
    into = memoryview(bytearray(b"\xaa" * len(data) + MARGIN))
    for position, (start, end) in enumerate(code.data_ranges(len(data))):
        if position in found:
            into[start:end] = found[position]
    missing = [position for position in range(code.data) if position not in found]
    parity = {position: shard for position, shard in found.items() if position >= code.data}
    lost = sum(shards[position].id.size_bytes > 0 for position in missing)
    before = bytes(into)
    try:
        restore(code, len(data), into, parity, missing)
    except LostShardsError:
        assert lost > len(parity)
        assert into == before
    else:
        assert lost <= len(parity)
        assert into == data + MARGIN
