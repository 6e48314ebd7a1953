"""Credentials that are renewed: early, once for all, and used while they last where that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from stoker._stores.http_objects import CredentialsInfo, RenewableCredentials
from stoker.errors import ConnectionLostError, CredentialsError, StoreError
from stoker.testing import run_virtual

LIFE_SECONDS, MARGIN_SECONDS = 3600.0, 200.0


class Endpoint:
    """Gives out tokens by number; within ``out`` it fails with ``error``, after ``slow_seconds``."""

    def __init__(self, *out: tuple[float, float], error: StoreError | None = None, slow_seconds: float = 0.0) -> None:
        self.out, self.slow_seconds = out, slow_seconds
        self.error = error or ConnectionLostError("the endpoint is out")
        self.asked: list[float] = []

    async def fetch(self) -> tuple[str, float]:
        now = asyncio.get_running_loop().time()
        self.asked.append(now)
        await asyncio.sleep(self.slow_seconds)
        if any(start <= now < end for start, end in self.out):
            raise self.error
        return f"token-{len(self.asked)}", LIFE_SECONDS


class Tokens(RenewableCredentials[str]):
    """What an endpoint gives."""

    margin_seconds = MARGIN_SECONDS

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def fetch(self) -> tuple[str, float]:
        return await self._endpoint.fetch()

    async def describe(self) -> CredentialsInfo:
        raise NotImplementedError


def run(endpoint: Endpoint, use: Callable[[RenewableCredentials[str]], Awaitable[None]]) -> None:
    async def main() -> None:
        await use(Tokens(endpoint))

    run_virtual(main())


@pytest.mark.parametrize("error", [ConnectionLostError("out"), CredentialsError("refused")])
def test_a_token_that_lasts_is_used_while_the_endpoint_fails(
    error: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint((3390.0, 3550.0), error=error)

    async def use(held: RenewableCredentials[str]) -> None:
        for _ in range(3550):
            assert await held.current() == "token-1"
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        assert await held.current() != "token-1"

    with caplog.at_level(logging.WARNING, logger="stoker"):
        run(endpoint, use)
    assert 10 <= len(endpoint.asked) <= 20  # not once for each request
    assert "could not be renewed" in caplog.text


def test_without_a_lasting_token_the_failure_is_reported() -> None:
    endpoint = Endpoint((0.0, 10.0), (3000.0, 9000.0))

    async def use(held: RenewableCredentials[str]) -> None:
        with pytest.raises(ConnectionLostError):
            await held.current()
        await asyncio.sleep(10.0)
        assert await held.current() == "token-2"
        await asyncio.sleep(LIFE_SECONDS)
        with pytest.raises(ConnectionLostError):
            await held.current()

    run(endpoint, use)


def test_only_the_renewing_request_waits_for_the_renewal() -> None:
    endpoint = Endpoint(slow_seconds=5.0)

    async def use(held: RenewableCredentials[str]) -> None:
        loop = asyncio.get_running_loop()
        await held.current()
        await asyncio.sleep(LIFE_SECONDS - MARGIN_SECONDS)
        renewing = asyncio.ensure_future(held.current())
        await asyncio.sleep(0)
        begun = loop.time()
        assert await held.current() == "token-1"
        assert loop.time() == begun
        assert await renewing == "token-2"

    run(endpoint, use)


def test_a_refused_token_is_not_used_again() -> None:
    endpoint = Endpoint((1.0, 20.0))

    async def use(held: RenewableCredentials[str]) -> None:
        await held.current()
        await asyncio.sleep(1.0)
        held.discard("another")
        assert await held.current() == "token-1"
        held.discard("token-1")
        with pytest.raises(ConnectionLostError):
            await held.current()
        await asyncio.sleep(20.0)
        assert await held.current() == "token-3"

    run(endpoint, use)
