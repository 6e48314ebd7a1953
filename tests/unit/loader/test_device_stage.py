"""Batches on a device, from a loader and from any iterable; the device is one of the host."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker._trace.recording import Recording
from stoker.errors import ConfigError, SampleError, StateError, StokerError
from stoker.trace import read_trace
from stoker_torch import DeviceStage, InformedDataLoader, Loader, RaggedColumn, StreamDataset
from stoker_torch._devices import parse_device
from support.datasets import numbers, pack_numbers, sample_of
from support.fake_device import ImmediateDevice, use_device


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ImmediateDevice:
    """The device that "cuda:0" is in this test."""
    device = ImmediateDevice()
    use_device(device, monkeypatch)
    return device


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def stage_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stoker-stage")]


# A loader.


@pytest.mark.parametrize("shuffle", ["none", "window", "full"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_on_the_device_are_those_of_host_memory(
    url: str, device: ImmediateDevice, shuffle: Any, ahead: int
) -> None:
    with (
        Loader(url, batch_size=32, shuffle=shuffle, with_ids=True) as host,
        Loader(url, batch_size=32, shuffle=shuffle, with_ids=True, device="cuda:0", ahead=ahead) as staged,
    ):
        for _ in range(2):
            for wanted, batch in zip(host, staged, strict=True):
                assert list(batch) == list(wanted)
                for name, values in wanted.items():
                    found = batch[name]
                    if isinstance(values, RaggedColumn):
                        assert torch.equal(found.offsets, values.offsets)
                        assert torch.equal(found.values.view(torch.uint8), values.values.view(torch.uint8))
                        assert found.lengths().tolist() == values.lengths().tolist()
                    else:
                        assert torch.equal(found, values)


def test_batches_are_staged_while_the_loop_is_busy_as_far_as_ahead_says(url: str, device: ImmediateDevice) -> None:
    with Loader(url, batch_size=50, columns=["x"], device="cuda:0", ahead=3) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: device.copies == 4)
        time.sleep(0.02)
        assert device.copies == 4
        for _ in batches:
            time.sleep(0.02)
    assert device.copies == 10
    assert device.threads == {"MainThread", "stoker-stage-0"}


def test_batches_that_are_kept_do_not_change(url: str, device: ImmediateDevice) -> None:
    with Loader(url, batch_size=10, shuffle="none", device="cuda:0") as loader:
        batches = list(loader)
    for index, batch in enumerate(batches):
        assert batch["x"].tolist() == list(range(index * 10, index * 10 + 10))
        assert batch["text"][3] == sample_of(index * 10 + 3)["text"]


def test_values_are_gathered_into_page_locked_memory_and_a_ragged_column_is_one_copy(
    url: str, device: ImmediateDevice
) -> None:
    with Loader(url, batch_size=50, shuffle="none", columns=["x", "image", "text"], device="cuda:0") as loader:
        batches = list(loader)
        staging = loader._resources.staging
        assert staging is not None
        buffers = staging.buffers.buffers_made
    assert device.copies == 3 * len(batches)
    assert buffers <= 3 * 2  # of each column, which differ in size; text of two sizes


def test_the_state_is_that_of_the_batch_yielded_last(url: str, device: ImmediateDevice) -> None:
    with Loader(url, batch_size=25, seed=5) as host:
        wanted = numbers(host)
    loader = Loader(url, batch_size=25, seed=5, device="cuda:0", ahead=4)
    batches = iter(loader)
    seen = [number for _ in range(3) for number in next(batches)["x"].tolist()]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    with Loader(url, batch_size=25, seed=5, device="cuda:0") as resumed:
        resumed.load_state_dict(state)
        assert seen + numbers(resumed) == wanted


def test_a_break_begins_the_next_epoch_and_a_loader_may_be_closed_and_begun_again(
    url: str, device: ImmediateDevice
) -> None:
    with Loader(url, batch_size=25) as host, Loader(url, batch_size=25, device="cuda:0") as loader:
        host.set_epoch(1)
        for _ in loader:
            break
        assert numbers(loader) == numbers(host)
        loader.close()
        assert stage_threads() == []
        assert numbers(loader) == numbers(host)


def test_an_abandoned_loader_leaves_no_thread(url: str, device: ImmediateDevice) -> None:
    loader = Loader(url, batch_size=10, device="cuda:0")
    batches = iter(loader)
    next(batches)
    assert stage_threads() != []
    del loader, batches
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stoker-stage"):
            thread.join(5)
    assert stage_threads() == []


def test_functions_run_on_the_host_and_batch_transform_on_the_device(url: str, device: ImmediateDevice) -> None:
    threads: dict[str, str] = {}

    def decode(value: torch.Tensor) -> torch.Tensor:
        threads["decode"] = threading.current_thread().name
        return value * 2

    def normalise(batch: dict[str, Any]) -> dict[str, Any]:
        threads["batch_transform"] = threading.current_thread().name
        return {**batch, "half": batch["x"].to(torch.float16)}

    settings: dict[str, Any] = {"shuffle": "none", "decode": {"x": decode}, "batch_transform": normalise}
    with Loader(url, batch_size=100, device="cuda:0", **settings) as loader:
        batches = list(loader)
    assert [batch["x"][0].item() for batch in batches] == [0, 200, 400, 600, 800]
    assert {batch["half"].dtype for batch in batches} == {torch.float16}
    assert threads["decode"].startswith("stoker-pool")
    assert threads["batch_transform"] in ("MainThread", "stoker-stage-0")


def test_an_error_of_batch_transform_names_the_batch_and_is_raised_in_its_place(
    url: str, device: ImmediateDevice
) -> None:
    def check(batch: dict[str, Any]) -> dict[str, Any]:
        if 120 in batch["x"].tolist():
            raise ValueError("too dark")
        return batch

    with Loader(url, batch_size=50, shuffle="none", device="cuda:0", batch_transform=check) as loader:
        batches = iter(loader)
        assert next(batches)["x"][0] == 0
        assert next(batches)["x"][0] == 50
        with pytest.raises(SampleError, match=r"sample 100 .*batch_transform failed: ValueError: too dark"):
            next(batches)
        with pytest.raises(SampleError, match="sample 100"):  # the next iteration continues there
            next(iter(loader))


def test_waits_add_up_and_the_trace_has_a_row_of_copies(url: str, device: ImmediateDevice, tmp_path: Path) -> None:
    with Loader(url, batch_size=50, device="cuda:0", trace=tmp_path / "trace.json") as loader:
        list(loader)
        statistics = loader.stats()
    assert statistics.batches == 10
    assert sum(statistics.waits.values()) == pytest.approx(statistics.wait_seconds, rel=1e-6)
    events = json.loads((tmp_path / "trace.json").read_text())
    copies = [event for event in events if event.get("cat") == "copy"]
    assert len(copies) == 10
    assert sum(event["args"]["bytes"] for event in copies) == device.copied_bytes
    assert len(Recording.of(read_trace(tmp_path / "trace.json")).copies) == 10
    assert "copies to fake:0" in [event["args"].get("name") for event in events if event["name"] == "thread_name"]


def test_static_yields_all_batches_in_the_tensors_of_the_first(url: str, device: ImmediateDevice) -> None:
    settings: dict[str, Any] = {"columns": ["x", "image"], "drop_last": True, "shuffle": "none"}
    with Loader(url, batch_size=150, device="cuda:0", static=True, **settings) as loader:
        seen = [(batch["x"].data_ptr(), batch["x"].tolist()) for _ in range(2) for batch in loader]
    assert len({address for address, _ in seen}) == 1
    assert [values for _, values in seen] == [list(range(at, at + 150)) for at in (0, 150, 300)] * 2


def test_static_refuses_batches_of_another_shape(url: str, device: ImmediateDevice) -> None:
    with (
        Loader(url, batch_size=50, device="cuda:0", static=True, drop_last=True) as loader,
        pytest.raises(ConfigError, match=r"pads ragged columns"),
    ):
        list(loader)


def test_on_the_cpu_nothing_changes(url: str) -> None:
    with Loader(url, batch_size=50, device="cpu", static=True, drop_last=True, pin_memory=False) as loader:
        assert len(numbers(loader)) == 500
        assert stage_threads() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:0"}, r"device='cuda:0': torch .* finds no cuda device on this machine"),
        ({"device": "gpu"}, r"device must be a device of torch, such as 'cuda:0', not 'gpu'"),
        ({"device": True}, r"not True"),
        ({"ahead": 0, "device": "cpu"}, r"ahead must be an integer of at least 1, not 0"),
        ({"ahead": 3}, r"give device="),
        ({"static": True, "drop_last": True}, r"give device="),
        ({"static": True, "device": "cpu"}, r"drop_last=True"),
        ({"static": 1, "device": "cpu"}, r"static must be True or False, not 1"),
        ({"device": "cuda:0", "pin_memory": True}, r"leave out pin_memory="),
    ],
    ids=str,
)
def test_wrong_settings_are_explained(
    url: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        Loader(url, batch_size=10, **settings)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_it_cannot_copy(url: str, device: ImmediateDevice) -> None:
    with Loader(url, batch_size=10, device="cuda:0") as loader:
        batches = iter(loader)
        next(batches)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            try:
                next(batches)
            except StokerError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert "cannot copy to fake:0" in pipe.read()
        assert next(batches)["x"].shape == (10,)


# Any iterable.


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 2), float(index)), index


@pytest.mark.parametrize("make", [DataLoader, InformedDataLoader])
def test_the_batches_of_a_data_loader_are_staged(device: ImmediateDevice, make: Callable[..., Any]) -> None:
    loader = make(Pairs(), batch_size=8)
    with DeviceStage(loader, "cuda:0") as stage:
        assert len(stage) == 5
        for _ in range(2):
            batches = list(stage)
            assert [indices.tolist() for _, indices in batches] == [list(range(at, at + 8)) for at in range(0, 40, 8)]
            assert type(batches[0]) is list
    assert device.copies == 2 * 2 * 5
    assert stage_threads() == []


def test_worker_processes_of_a_stream_data_set_are_staged(url: str, device: ImmediateDevice) -> None:
    dataset = StreamDataset(url, batch_size=50, rank=0, world_size=1)
    with DeviceStage(DataLoader(dataset, batch_size=None, num_workers=2), "cuda:0") as stage:
        seen = numbers(stage)
    assert sorted(seen) == list(range(500))


def test_an_error_is_raised_in_its_place_and_the_iterable_goes_on(device: ImmediateDevice) -> None:
    class Flaky:
        def __init__(self) -> None:
            self.numbers = iter(range(4))

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            number = next(self.numbers)
            if number == 1:
                raise OSError("batch 1")
            return torch.tensor(number)

    with DeviceStage(Flaky(), "cuda:0") as stage:
        batches = iter(stage)
        assert next(batches) == 0
        with pytest.raises(OSError, match="batch 1"):
            next(batches)
        assert [int(batch) for batch in batches] == [2, 3]
        assert next(batches, None) is None


def test_strides_nested_values_and_tensors_without_elements_stay(device: ImmediateDevice) -> None:
    image = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    batch = {"image": image, "nested": ({"empty": torch.zeros(0, 3)}, [torch.tensor(1)], "text"), "wide": image[:, 1:]}
    with DeviceStage([batch], "cuda:0") as stage:
        (staged,) = stage
    assert torch.equal(staged["image"], image)
    assert staged["image"].stride() == image.stride()
    assert staged["nested"][0]["empty"].shape == (0, 3)
    assert staged["nested"][1] == [torch.tensor(1)]
    assert staged["nested"][2] == "text"
    assert torch.equal(staged["wide"], image[:, 1:])


def test_the_state_of_the_iterable_is_that_after_the_batch_yielded_last(device: ImmediateDevice) -> None:
    class Counting:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.position < 6:
                self.position += 1
                yield torch.tensor(self.position)
            self.position = 0

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    stage = DeviceStage(Counting(), "cuda:0", ahead=3)
    batches = iter(stage)
    assert stage.state_dict() == {"position": 0}
    assert [int(next(batches)) for _ in range(2)] == [1, 2]
    state = stage.state_dict()
    assert state == {"position": 2}
    stage.load_state_dict(state)
    assert [int(batch) for batch in stage] == [3, 4, 5, 6]
    assert stage.state_dict() == {"position": 0}
    stage.close()
    with pytest.raises(StateError, match="list has no state_dict"):
        DeviceStage([1], "cuda:0").state_dict()


def test_an_iterable_whose_state_dict_has_no_state_is_staged(device: ImmediateDevice) -> None:
    class Stateless(list[Any]):
        def state_dict(self) -> Any:
            raise AttributeError("no state")

    with DeviceStage(Stateless([torch.tensor(1)]), "cuda:0") as stage:
        assert [int(batch) for batch in stage] == [1]


def test_on_the_cpu_the_iterable_is_iterated_directly() -> None:
    assert list(DeviceStage([1, 2], "cpu")) == [1, 2]
    assert list(DeviceStage([1, 2], "cpu", batch_transform=lambda batch: batch + 1)) == [2, 3]


def test_a_ragged_column_on_the_device_is_read_without_its_offsets(device: ImmediateDevice) -> None:
    url = "memory://ragged-stage/ds"
    with stoker.Packer(url, schema={"tokens": stoker.Ragged("int64")}) as packer:
        packer.extend({"tokens": list(range(length))} for length in (2, 0, 3))
    with Loader(url, batch_size=3, shuffle="none", device="cuda:0") as loader:
        (batch,) = loader
    tokens = batch["tokens"]
    tokens.offsets.zero_()  # nothing but the device's own work reads them
    assert tokens[2].tolist() == [0, 1, 2]
    assert tokens.to_padded(-1).tolist() == [[0, 1, -1], [-1, -1, -1], [0, 1, 2]]
    assert tokens[[2, 0]].to_padded().tolist() == [[0, 1, 2], [0, 1, 0]]


def test_devices_are_parsed_as_torch_does() -> None:
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    assert parse_device(torch.device("mps")) == torch.device("mps")
    with pytest.raises(ConfigError, match="not None"):
        parse_device(None)
