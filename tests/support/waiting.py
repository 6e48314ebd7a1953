"""Waiting for conditions that other processes bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["until", "until_async"]

_WAIT_SECONDS = 300.0  # of a hang


async def until(holds: Callable[[], Any]) -> Any:
    """Wait until a function returns a true value, and return it.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = asyncio.get_running_loop().time() + _WAIT_SECONDS
    while not (value := holds()):
        assert asyncio.get_running_loop().time() < deadline, "this never came true"
        await asyncio.sleep(0.002)
    return value


async def until_async(holds: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until a coroutine function returns a true value, and return it.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = asyncio.get_running_loop().time() + _WAIT_SECONDS
    while not (value := await holds()):
        assert asyncio.get_running_loop().time() < deadline, "this never came true"
        await asyncio.sleep(0.002)
    return value
