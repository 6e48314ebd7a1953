"""Samples by number: the same on every store."""

from __future__ import annotations

import stoker
from stoker import FetchConfig
from support.datasets import pack_at, sample_of
from support.stores import Place

SAMPLES = 200


def test_samples_requested_by_number_are_those_packed_on_every_store(place: Place) -> None:
    pack_at(place, SAMPLES)
    with stoker.open(place.url, options=place.options, memory="1MB", fetch=FetchConfig(hedge=False)) as dataset:
        for indices in ([7], [199, 3, 3, 50, -1], range(0, SAMPLES, 9), range(SAMPLES)):
            for index, found in zip(indices, dataset.samples(indices), strict=True):
                wanted = sample_of(index % SAMPLES)
                assert (int(found["x"]), found["text"]) == (wanted["x"], wanted["text"])
                assert found["image"].tolist() == wanted["image"].tolist()
                assert found["tokens"].tolist() == wanted["tokens"].tolist()
        stats = dataset.stats()
        dataset.samples(range(5))
        assert dataset.stats().get_requests - stats.get_requests == 1, "the head is known; the values are neighbours"
