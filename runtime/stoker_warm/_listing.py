"""Lists of shards, page by page: what an instance holds, and what it is to let go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise

from stoker.errors import WireError
from stoker_warm._asking import Reply
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._shard import ShardId
from stoker_warm._wire import Head

__all__ = ["deletions", "list_all", "listed_page"]


async def list_all(name: str, ask: Callable[[Head], Awaitable[Reply | None]], most: int) -> list[ShardId] | None:
    """Return all shards that somebody holds, in their order, asked for page by page.

    Args:
        name: what to call him in an error.
        ask: sends an INDEX with the head that it is given; None gives up.
        most: shards.

    Raises:
        WireError: a page is not as it should be, or there are too many shards.
    """
    listed = list[ShardId]()
    while (reply := await ask({"after": listed[-1].to_text()} if listed else {})) is not None:
        listed += listed_page(name, reply.head, listed, most)
        if not reply.head.get("more"):
            return listed
    return None


def deletions(shards: Sequence[ShardId]) -> Iterator[Head]:
    """Yield the heads of as many DELETE as it takes to name all shards."""
    for start in range(0, len(shards), LISTED_AT_ONCE):
        yield {"shards": [shard.to_text() for shard in shards[start : start + LISTED_AT_ONCE]]}


def listed_page(name: str, head: Head, before: Sequence[ShardId], most: int) -> list[ShardId]:
    """Return the shards of an answer to INDEX, behind those of the answers before.

    Raises:
        WireError: it is no such answer, has shards out of their order, or is one too many.
    """
    page = head.get("shards")
    if not isinstance(page, list) or (head.get("more") and not page):
        raise WireError(f"{name} lists {page!r:.40}, not shards")
    shards = [ShardId.parse(each) for each in page]
    if any(one >= other for one, other in pairwise([*before[-1:], *shards])):
        raise WireError(f"{name} lists shards that are not in their order")
    if len(before) + len(shards) > most:
        raise WireError(f"{name} lists more than {most} shards")
    return shards
