"""How deep the way from the prefetcher to the socket is: coroutines and functions of ours, in all tasks on the way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

import stoker
from stoker_local import LocalBucket
from stoker_torch import Loader

MAX_FRAMES_TO_STORE = 6
"""The prefetcher, the reader of super-samples, the object fetch, and a range's tries, their race and its attempts."""
MAX_FRAMES = 13
"""Beside those: the store, with its signing, and the transport."""
ROOT = str(Path(stoker.__file__).parent)


def frames_of(frame: FrameType | None) -> Iterator[str]:
    """Yield the functions of ours that are being run, innermost first; those of the thread's own loop aside."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.endswith("threads.py"):
            yield f"{file[len(ROOT) + 1 :]}:{frame.f_code.co_qualname}"
        frame = frame.f_back


class Recorded:
    """The frames of each GET that is written to a socket, from the prefetcher on, outermost first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[str]] = []
        creators: WeakKeyDictionary[asyncio.Task[Any], tuple[asyncio.Task[Any] | None, list[str]]] = WeakKeyDictionary()
        create_task = asyncio.BaseEventLoop.create_task
        write = asyncio.selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]  # private to asyncio

        def recorded_create_task(loop: Any, coroutine: Any, **others: Any) -> asyncio.Task[Any]:
            task = create_task(loop, coroutine, **others)
            creator = asyncio.current_task() if asyncio._get_running_loop() is not None else None
            creators[task] = creator, list(frames_of(sys._getframe(1)))
            return task

        def recorded_write(transport: Any, data: Any) -> None:
            if bytes(data[:4]) == b"GET ":
                frames, task = list(frames_of(sys._getframe(1))), asyncio.current_task()
                while task is not None and not any("prefetcher.py" in frame for frame in frames):
                    task, more = creators.get(task, (None, []))
                    frames += more
                depth = next((place for place, frame in enumerate(frames) if "prefetcher.py" in frame), None)
                if depth is not None:
                    self.found.append(frames[depth::-1])
            write(transport, data)

        monkeypatch.setattr("asyncio.BaseEventLoop.create_task", recorded_create_task)
        monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write", recorded_write)


@pytest.mark.parametrize("columns", [None, ["image"]])
def test_the_way_from_the_prefetcher_to_the_socket_is_short(
    columns: list[str] | None, local_bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in local_bucket.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{local_bucket.config.buckets[0].name}/frames-{columns}"
    schema = {"image": stoker.Array("uint8", (4096,)), "mask": stoker.Array("uint8", (8192,))}
    with stoker.Packer(url, schema=schema, super_sample_bytes=200_000) as packer:
        packer.extend({"image": np.zeros(4096, np.uint8), "mask": np.zeros(8192, np.uint8)} for _ in range(100))
    recorded = Recorded(monkeypatch)
    with Loader(url, batch_size=50, columns=columns) as loader:
        assert len(list(loader)) == 2
    assert len(recorded.found) >= 5
    most = MAX_FRAMES_TO_STORE + (columns is not None)  # a head is fetched by a function of its own
    for frames in recorded.found:
        to_store = [frame for frame in frames if frame.startswith("_fetch/")]
        assert len(to_store) <= most, to_store
        assert len(frames) <= MAX_FRAMES, frames
