"""The store against a model that is too simple to be wrong: a list of shards, the least recently used at its head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_warm._shard import SHARD_OVERHEAD_BYTES, Shard, ShardId, ShardStore

IDS = [ShardId(f"{number % 4:032x}", 2, 1, number // 4) for number in range(12)]


@dataclass
class Place:
    shard: Shard

    @property
    def occupied_bytes(self) -> int:
        return len(self.shard.payload) + SHARD_OVERHEAD_BYTES


class Model:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.places: list[Place] = []
        self.changes = 0

    @property
    def held_bytes(self) -> int:
        return sum(place.occupied_bytes for place in self.places)

    @property
    def ids(self) -> list[ShardId]:
        return sorted(place.shard.id for place in self.places)

    def find(self, shard_id: ShardId) -> Place | None:
        return next((place for place in self.places if place.shard.id == shard_id), None)

    def set(self, shard_id: ShardId, mac: str, payload: bytes) -> list[ShardId] | None:
        newcomer, evicted = Place(Shard(shard_id, mac, payload)), []
        if newcomer.occupied_bytes > self.limit_bytes:
            return None
        self.delete(shard_id)
        while self.held_bytes + newcomer.occupied_bytes > self.limit_bytes:
            evicted.append(self.places.pop(0).shard.id)
            self.changes += 1
        self.places.append(newcomer)
        self.changes += 1
        return evicted

    def get(self, shard_id: ShardId) -> Shard | None:
        place = self.find(shard_id)
        if place is None:
            return None
        self.places.remove(place)
        self.places.append(place)
        return place.shard

    def delete(self, shard_id: ShardId) -> bool:
        place = self.find(shard_id)
        if place is None:
            return False
        self.places.remove(place)
        self.changes += 1
        return True

    def page(self, after: ShardId | None, limit: int | None) -> list[ShardId]:
        return [each for each in self.ids if after is None or each > after][:limit]


def hash_of(shards: list[Shard]) -> int:
    """Return the hash of a store to which shards came in this order."""
    store = ShardStore(1 << 20)
    for shard in shards:
        assert isinstance(shard.payload, bytes)
        assert store.set(shard.id, shard.mac, shard.payload) == []
    return store.version.hash


ids = st.sampled_from(IDS)
sizes = st.one_of(st.sampled_from([0, 1, 200, 500]), st.integers(0, 5 * SHARD_OVERHEAD_BYTES))
actions = st.one_of(
    st.tuples(st.just("set"), ids, st.sampled_from(["00", "01", "02"]), sizes.map(bytes)),
    st.tuples(st.just("get"), ids),
    st.tuples(st.just("delete"), ids),
    st.tuples(st.just("list_ids"), st.none() | ids, st.none() | st.integers(1, 5)),
)


@settings(max_examples=600)
@given(st.integers(0, 8 * SHARD_OVERHEAD_BYTES), st.lists(actions, max_size=40))
def test_a_shelf_agrees_with_the_model_after_every_step(limit_bytes: int, steps: list[tuple[Any, ...]]) -> None:
    store, model = ShardStore(limit_bytes), Model(limit_bytes)
    for name, *arguments in steps:
        expected = model.page(*arguments) if name == "list_ids" else getattr(model, name)(*arguments)
        assert getattr(store, name)(*arguments) == expected
        assert store.list_ids() == model.ids
        assert store.held_bytes == model.held_bytes <= limit_bytes
        assert store.version.change_count == model.changes
        assert len(store) == len(model.places)
    shards = [place.shard for place in model.places]
    assert store.version.hash == hash_of(shards) == hash_of(shards[::-1])
    assert all((each in store) == (model.find(each) is not None) for each in IDS)
