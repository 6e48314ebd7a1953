"""Buffers that are used again: never one that anybody holds, never one that a GPU may still read."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from stoker._fetch.gather import gather_rows
from stoker_torch._tensors import BufferPool, can_pin_memory
from support.cases import for_each

MEMORY = memoryview(bytearray(range(256)) * 64)


def rows(pool: BufferPool, *, start: int = 0, count: int = 8) -> Any:
    return pool.gather_rows(MEMORY, np.arange(start, start + count), 16)


@pytest.mark.parametrize("row_bytes", [1, 3, 16, 1000])
@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("torch_threads", [1, 8])
def test_rows_are_those_of_a_plain_gather_from_any_address(
    row_bytes: int, count: int, torch_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    addresses = np.random.default_rng(0).integers(0, len(MEMORY) - row_bytes + 1, count)
    gathered = BufferPool().gather_rows(MEMORY, addresses, row_bytes)
    assert gathered.shape == (count, row_bytes)
    assert np.array_equal(gathered, gather_rows(MEMORY, addresses, row_bytes))


@pytest.mark.parametrize("address", [-1, len(MEMORY) - 15, len(MEMORY) + 1])
def test_a_row_outside_the_memory_is_an_index_error(address: int) -> None:
    with pytest.raises(IndexError):
        BufferPool().gather_rows(MEMORY, np.array([0, address]), 16)


def test_large_rows_are_copied_one_by_one() -> None:
    memory = memoryview(np.random.default_rng(0).bytes(1 << 20))
    addresses = np.random.default_rng(1).integers(0, len(memory) - 20_000, 16)
    assert np.array_equal(BufferPool().gather_rows(memory, addresses, 20_000), gather_rows(memory, addresses, 20_000))


def test_a_dropped_buffer_is_used_again() -> None:
    pool = BufferPool()
    for _ in range(10):
        rows(pool)
    assert pool.buffers_made == 1


@for_each(
    "hold",
    [
        lambda array: array,
        lambda array: array[2:3],
        lambda array: array.view(np.uint16),
        lambda array: memoryview(array),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[3],
        lambda array: torch.from_numpy(array).view(torch.bfloat16).reshape(-1),
        lambda array: torch.from_numpy(array)[1].numpy(),
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: torch.from_numpy(array).detach(),
        lambda array: (torch.from_numpy(array).float().requires_grad_() * torch.from_numpy(array)).grad_fn,
    ],
)
def test_whatever_is_made_of_a_buffer_keeps_it_from_being_used_again(hold: Any) -> None:
    pool = BufferPool()
    held = hold(rows(pool))
    other = rows(pool, start=100)
    assert pool.buffers_made == 2
    del held, other
    rows(pool)
    rows(pool)
    assert pool.buffers_made == 2


def test_a_buffer_of_about_the_size_serves_and_others_do_not() -> None:
    pool = BufferPool()
    rows(pool, count=300)
    rows(pool, count=500)  # both between 4 and 8 KiB
    assert pool.buffers_made == 1
    rows(pool, count=10)
    assert pool.buffers_made == 2


class FakeCuda:
    """Replaces torch.cuda: events that complete when the test demands it."""

    def __init__(self) -> None:
        self.passed = False
        self.recorded = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def Event(self) -> FakeCuda:  # noqa: N802 - torch's name
        return self

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.passed


def test_a_buffer_waits_for_an_event_that_was_recorded_after_it_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr("stoker_torch._tensors.torch.cuda", cuda)
    pool = BufferPool()
    held = rows(pool)
    assert cuda.recorded == 0
    other = rows(pool)
    assert (pool.buffers_made, cuda.recorded) == (2, 0)
    del held
    third = rows(pool)  # the first is dropped, its event has not passed
    assert (pool.buffers_made, cuda.recorded) == (3, 1)
    cuda.passed = True
    fourth = rows(pool)
    assert (pool.buffers_made, cuda.recorded) == (3, 1)
    del other, third, fourth
    rows(pool)
    assert (pool.buffers_made, cuda.recorded) == (3, 2)  # an event of an earlier use counts for nothing


def test_pinning_without_a_gpu_is_a_warning_and_not_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "stoker"):
        assert not can_pin_memory()
    assert "no CUDA device" in caplog.text
