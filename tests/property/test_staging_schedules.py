"""Staging under every kind of interleaving: no read before its copy, no write before its read, no waiting loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stoker_torch._devices import Device
from stoker_torch._staging import HostBuffers, StagedBatch, StagedIteration, Stager, StaticBatch
from support.fake_device import FakeDevice, FakeStream
from support.staging_schedules import Schedule

_BLOCKS = 10
_SCHEDULES_PER_BLOCK = 250


def explore(seeds: range) -> Counter[str]:
    """Run schedules; raise if a kernel read anything but its batch."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        schedule.run()
        assert not schedule.wrong, f"seed {seed}: {schedule.wrong[:3]}"
        seen.update(set(schedule.events))
    return seen


@pytest.mark.parametrize("block", range(_BLOCKS))
def test_every_kernel_reads_its_batch_in_any_order_of_events(block: int) -> None:
    seen = explore(range(block * _SCHEDULES_PER_BLOCK, (block + 1) * _SCHEDULES_PER_BLOCK))
    kinds = ("read", "break", "error", "capture", "transform", "ahead", "asked", "shared")
    rare = {name: seen[name] for name in kinds if seen[name] < 10}
    assert not rare, f"the schedules of this block hardly have them: {rare}"


def _without_wait(stream: FakeStream, event: Any) -> None:
    pass


def _without_use(device: FakeDevice, tensor: Any, stream: FakeStream) -> None:
    pass


def _without_free_buffers(stager: Stager, limit: int = 0) -> None:
    stager._running.clear()


def _free_at_once(buffers: HostBuffers, size_bytes: int) -> Any:
    buffers.__dict__.setdefault("only", {})
    return buffers.__dict__["only"].setdefault(size_bytes, buffers._allocate(size_bytes).numpy())[:size_bytes]


def _update_without_order(static: StaticBatch, staged: Any, stream: FakeStream) -> Any:
    static._stream = stream
    return _update(static, staged, stream)


def _use_once(iteration: StagedIteration[Any], staged: StagedBatch[Any]) -> FakeStream:
    stream = iteration._staging.device.current_stream()
    if staged.user is None:
        _use(iteration, staged)
    return stream  # type: ignore[return-value]  # the device is the fake one


_update, _use = StaticBatch.update, StagedIteration.use
_FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the loop's stream does not wait for the copy": (FakeStream, "wait_event", _without_wait),
    "freed memory is not kept for the loop's stream": (FakeDevice, "record_use", _without_use),
    "buffers are written before their copy is complete": (Stager, "free_buffers", _without_free_buffers),
    "one buffer for all batches": (HostBuffers, "empty", _free_at_once),
    "static tensors are overwritten under another stream": (StaticBatch, "update", _update_without_order),
    "only the first stream waits for what several use": (StagedIteration, "use", _use_once),
    "the thread forbids captures": (FakeDevice, "enter_thread", lambda device: None),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_the_schedules_find_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, function = _FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    with pytest.raises(AssertionError):
        explore(range(300))


def test_the_fake_has_what_staging_needs() -> None:
    names = [name for name in vars(Device) if not name.startswith("_")]
    assert [name for name in names if not hasattr(FakeDevice, name)] == []
