"""Staging on a real CUDA device, with random delays on its streams; runs only where there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

import stoker
from stoker_torch import RaggedColumn
from stoker_torch._devices import StreamDevice
from stoker_torch._staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_CYCLES = 200_000
"""Longest delay of a stream: about 0.1 ms."""


def _sleep(random: Random) -> None:
    torch.cuda._sleep(random.choice([1, _CYCLES // 10, _CYCLES]))


class GpuSchedule:
    """One training loop on the device, with batches, delays and streams by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.is_static = self.random.random() < 0.3
        self.wanted: list[tuple[torch.Tensor, list[int]]] = []

    def values(self, number: int) -> list[int]:
        return [number * 7 + place for place in range(4 if self.is_static else 1 + number % 4)] * 5000

    def take(self, count: int) -> Callable[[], tuple[int, Any] | None]:
        numbers = iter(range(count))

        def take() -> tuple[int, Any] | None:
            number = next(numbers, None)
            if number is None:
                return None
            values = torch.tensor(self.values(number))
            offsets = torch.tensor([0, 1, len(values)])
            return number, {"x": values, "tokens": RaggedColumn(stoker.Ragged("int64"), values.clone(), offsets)}

        return take

    def transform(self, number: int, batch: Any) -> Any:
        _sleep(self.random)
        return {**batch, "y": batch["x"] + 1}

    def run(self, staging: Staging) -> None:
        """Train an epoch, then compare what the kernels read."""
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        iteration = staging.iterate(self.take(12), self.transform)
        kept: list[Any] = []
        while True:
            with torch.cuda.stream(self.random.choice(streams)):
                taken = iteration.next()
                if taken is None:
                    break
                number, batch = taken
                _sleep(self.random)
                self.read(number, batch)
                if not self.is_static and self.random.random() < 0.3:
                    kept.append((torch.cuda.current_stream(), number, batch))
                if kept and self.random.random() < 0.3:
                    stream, *of = kept.pop()
                    with torch.cuda.stream(stream):
                        self.read(*of)
                del batch, taken
            if self.random.random() < 0.3:
                time.sleep(0.003)  # a busy loop, for which batches are staged ahead
        torch.cuda.synchronize()
        for found, wanted in self.wanted:
            assert found.tolist() == wanted

    def read(self, number: int, batch: Any) -> None:
        values = self.values(number)
        self.wanted.append((batch["x"].clone(), values))
        self.wanted.append((batch["y"].clone(), [value + 1 for value in values]))
        self.wanted.append((batch["tokens"].values.clone(), values))
        self.wanted.append((batch["tokens"].offsets.clone(), [0, 1, len(values)]))


@pytest.mark.parametrize("block", range(4))
def test_every_kernel_reads_its_batch(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        schedule = GpuSchedule(seed)
        staging = Staging(
            lambda: StreamDevice(torch.device("cuda", 0)),
            ahead=schedule.random.randint(1, 3),
            is_static=schedule.is_static,
        )
        for _ in range(2):
            schedule.run(staging)
        staging.close()


def test_the_thread_stages_while_the_loop_captures_a_graph() -> None:
    weights = torch.randn(256, 256, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        weights @ weights  # what a library allocates at first use must not be captured
    torch.cuda.synchronize()
    sizes = iter(range(1, 1000))
    staged: list[str] = []

    def take() -> tuple[None, Any]:
        staged.append(threading.current_thread().name)
        return None, torch.zeros(next(sizes) * 50_000)  # each larger, so that memory is allocated

    staging = Staging(lambda: StreamDevice(torch.device("cuda", 0)), ahead=8)
    for _ in range(5):
        iteration = staging.iterate(take)
        assert iteration.next() is not None
        before = len(staged)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = weights
            for _ in range(100):
                result = result @ weights
                time.sleep(0.0005)
        graph.replay()
        torch.cuda.synchronize()
        assert len(staged) > before
    staging.close()


def test_the_loop_never_waits_for_the_device() -> None:
    staging = Staging(lambda: StreamDevice(torch.device("cuda", 0)), ahead=2)
    iteration = staging.iterate(lambda: (None, {"x": torch.zeros(1 << 20)}))
    iteration.next()
    time.sleep(0.05)
    torch.cuda._sleep(2_000_000_000)  # about a second
    started = time.perf_counter()
    for _ in range(10):
        iteration.next()
        time.sleep(0.005)
    assert not torch.cuda.current_stream().query()
    assert time.perf_counter() - started < 0.5
    staging.close()
    torch.cuda.synchronize()
