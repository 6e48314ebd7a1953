"""Random uses of a loader: iterations left, deleted, closed from any thread, and restarted; nothing hangs or leaks."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import stoker
from stoker._fetch.pipeline import BatchPipeline
from stoker.errors import StokerError
from stoker_torch import Loader

__all__ = ["live", "pack_wide"]

SAMPLES, BATCH = 200, 20
HANG_SECONDS = 60.0


def pack_wide(url: str) -> str:
    """Pack samples of 8 KB, so that gathering a batch takes a while, and return the URL."""
    with stoker.Packer(url, schema={"x": stoker.Array("int64", (1000,))}, super_sample_bytes=100_000) as packer:
        packer.extend({"x": [number] * 1000} for number in range(SAMPLES))
    return url


def first_column(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"][:1]}


class _Life:
    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.closers: list[threading.Thread] = []

    def live(self) -> None:
        loader = self.create_loader()
        for _ in range(self.rng.randint(1, 4)):
            act = self.rng.choice([self.leave, self.leave, self.keep, self.close, self.close_elsewhere, self.restore])
            with suppress(StokerError) if self.is_being_closed else nullcontext():
                act(loader)
        self.end(loader)
        del loader
        for closer in self.closers:
            closer.join()

    def create_loader(self) -> Loader:
        settings: dict[str, Any] = self.rng.choice([{}, {}, {"with_ids": True}, {"transform": first_column}])
        return Loader(self.url, batch_size=BATCH, seed=self.rng.randint(0, 9), memory="4MB", workers=2, **settings)

    def leave(self, loader: Loader) -> None:
        """Break out of a loop that computes between its batches, so that the next one is gathered meanwhile."""
        stop = self.rng.randint(1, 8)
        for number, _ in enumerate(loader, 1):
            time.sleep(self.rng.choice([0.0, 0.0022, 0.003]))
            if number == stop:
                break

    def keep(self, loader: Loader) -> None:
        """Leave an iteration that is still referenced, and ends with its loader."""
        batches = iter(loader)
        next(batches)
        time.sleep(0.0022)
        next(batches)
        loader.kept = batches  # type: ignore[attr-defined]  # a cycle: only the collector can free it

    def close(self, loader: Loader) -> None:
        loader.close()

    def close_elsewhere(self, loader: Loader) -> None:
        """Close the loader from another thread while this one is in the loop."""

        def close(delay_seconds: float = self.rng.choice([0.0, 0.002, 0.006])) -> None:
            time.sleep(delay_seconds)
            loader.close()

        closer = threading.Thread(target=close)
        closer.start()
        self.closers.append(closer)
        with suppress(StokerError):
            self.leave(loader)

    @property
    def is_being_closed(self) -> bool:
        return any(closer.is_alive() for closer in self.closers)

    def restore(self, loader: Loader) -> None:
        """Resume at the loader's state, to the end: exactly the rest of the epoch is delivered."""
        for closer in self.closers:
            closer.join()
        epoch, position = (state := loader.state_dict())["epoch"], state["position"]
        loader.load_state_dict(state)
        seen = sorted(number for batch in loader for number in batch["x"][:, 0].tolist())
        assert len(set(seen)) == len(seen) == SAMPLES - position
        assert loader.state_dict()["epoch"] == epoch + 1

    def end(self, loader: Loader) -> None:
        if self.rng.random() < 0.6:
            loader.close()


@contextmanager
def _slow_gathering(rng: random.Random) -> Iterator[None]:
    """Delay the thread that gathers ahead, so that the loader is closed before it begins."""
    wrapped = BatchPipeline.next

    def slow(self: BatchPipeline) -> Any:
        if threading.current_thread().name.startswith("stoker-gather"):
            time.sleep(rng.choice([0.0, 0.001, 0.004]))
        return wrapped(self)

    with mock.patch.object(BatchPipeline, "next", slow):
        yield


def live(url: str, seed: int) -> None:
    """Run one random sequence of uses.

    Raises:
        AssertionError: it hung, left a thread running, or a finalizer reported an error.
    """
    said: list[str] = []
    failed: list[BaseException] = []
    before = set(threading.enumerate())

    def run() -> None:
        try:
            _Life(url, seed).live()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the test
            failed.append(error)

    hook = lambda unraisable: said.append(repr(unraisable.exc_value))  # noqa: E731 - what mock.patch puts there
    with mock.patch.object(sys, "unraisablehook", hook), _slow_gathering(random.Random(seed)):
        life = threading.Thread(target=run, name=f"life-{seed}", daemon=True)
        life.start()
        life.join(HANG_SECONDS)
        assert not life.is_alive(), f"life {seed} hangs"
        if failed:
            raise failed[0]
        gc.collect()
        give_up = time.monotonic() + HANG_SECONDS
        while (left := set(threading.enumerate()) - before) and time.monotonic() < give_up:
            time.sleep(0.001)
        assert not left, f"life {seed} left {left}"
    assert not said, f"life {seed}: {said}"
