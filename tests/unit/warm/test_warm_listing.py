"""What a node says that it holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.errors import WireError
from stoker_warm._node_client import NodeClient
from stoker_warm._shard import ShardId, parse_page
from support.warm_one_node import DATA, NAME, SHARD, check
from support.warm_platform import Tier


def test_a_listing_during_which_something_came_is_made_again() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        listing = asyncio.ensure_future(node.list_shards())
        await asyncio.sleep(0.0011)  # the answer is on its way
        node._change_count += 1
        assert await listing == [SHARD]
        assert node.state_machine.has_shard_list

    check(test)


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"shards": 7},
        {"shards": ["x"]},
        {"shards": [], "more": 1},
        {"shards": [SHARD.to_text(), SHARD.to_text()]},
        {"shards": [ShardId(NAME, 1, 1, 1).to_text(), ShardId(NAME, 1, 1, 0).to_text()]},
    ],
)
def test_lists_that_cannot_be_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        parse_page("warm-0", head, [], 10)


def test_a_list_that_has_no_end_is_refused() -> None:
    page = {"shards": [ShardId(NAME, 1, 20, at).to_text() for at in range(10, 20)], "more": 1}
    before = [ShardId(NAME, 1, 20, at) for at in range(10)]
    assert len(parse_page("warm-0", page, before, 20)) == 10
    with pytest.raises(WireError, match="more than 19"):
        parse_page("warm-0", page, before, 19)
    with pytest.raises(WireError, match="order"):
        parse_page("warm-0", page, [ShardId(NAME, 1, 20, 15)], 20)
