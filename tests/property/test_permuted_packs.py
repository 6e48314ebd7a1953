"""A permuted pack has every sample once, in the documented order, whatever its sizes, parts and interruptions."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker._order.random_words import FeistelPermutation, Purpose, words
from stoker._pack import shuffle
from stoker.errors import StoreError
from stoker.testing import DyingStore
from support.packing import contents, fresh_store, pack


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    parts=st.integers(1, 8),
    super_sample_bytes=st.integers(400, 3000),
    seed=st.integers(0, (1 << 64) - 1),
    deaths=st.lists(st.integers(1, 120), max_size=2),
)
def test_every_sample_is_packed_once_in_the_order_of_the_permutation(
    sizes: list[int], parts: int, super_sample_bytes: int, seed: int, deaths: list[int]
) -> None:
    samples = [{"data": bytes([number % 251]) * size, "label": number} for number, size in enumerate(sizes)]
    keys = words(FeistelPermutation.ROUNDS, seed=seed, purpose=Purpose.PACK, epoch=0)
    order = FeistelPermutation(len(samples), keys)(np.arange(len(samples))).tolist()

    async def main() -> None:
        store = fresh_store()
        for lives in deaths:
            try:
                await pack(
                    DyingStore(store, lives, late=False), samples, super_sample_bytes=super_sample_bytes, shuffle=seed
                )
            except StoreError:
                continue
            break
        else:
            await pack(store, samples, super_sample_bytes=super_sample_bytes, shuffle=seed)
        found = [(int(each["label"]), bytes(each["data"])) for each in await contents(store)]
        assert found == [(number, samples[number]["data"]) for number in order]

    with patch.object(shuffle, "_count_parts", lambda staged, _: min(parts, staged.samples)):
        asyncio.run(main())
