"""Batches sent in buffers that are used again: exact values, and never a buffer that anybody holds."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker._fetch.gather import RaggedValues
from stoker._fetch.gather import gather_rows as plain_gather
from stoker.errors import StokerError
from stoker_torch import RaggedColumn, _shared_batches
from stoker_torch._shared_batches import SharedBatch, SharedBuffers
from support.cases import for_each

LARGE = 1 << 20
"""Elements of a tensor that is sent in a buffer of its own."""


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """The thread that sends file descriptors ends with the test, and buffers of one test are not known to the next."""
    yield
    resource_sharer.stop(timeout=10)
    _shared_batches._mappings.clear()


def through_pipe(columns: dict[str, Any], buffers: SharedBuffers) -> dict[str, Any]:
    """Send a batch as a DataLoader's queue does, and receive it in this process."""
    received: dict[str, Any] = pickle.loads(ForkingPickler.dumps(SharedBatch(columns, buffers)))  # noqa: S301 - its own
    return received


def filled(value: int, buffers: SharedBuffers, size: int = LARGE) -> torch.Tensor:
    """Return a tensor of ``uint8`` that was made in a buffer."""
    array = buffers.empty(size)
    array[:] = value
    return torch.from_numpy(array)


def count_buffers(buffers: SharedBuffers) -> int:
    return len(buffers._buffers)


DTYPES = [torch.uint8, torch.bool, torch.int16, torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.cfloat]


@for_each("dtype", DTYPES, ids=str)
@for_each("shape", [(), (0,), (3, 0), (5,), (3, 7), (200, 300)])
def test_a_tensor_of_any_dtype_and_shape_is_received_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = {"a": torch.ones(1), "values": torch.randint(0, 2, shape).to(dtype), "b": torch.arange(3)}
    received = through_pipe(sent, SharedBuffers())
    assert type(received) is dict
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert received[name].equal(tensor)


@pytest.mark.parametrize("size", [3, 10_000, LARGE])
def test_ragged_columns_strings_and_lists_are_received_as_they_were(size: int) -> None:
    column = stoker.Ragged("int32")
    data = np.arange(size, dtype=np.int32).view(np.uint8)
    ragged = RaggedColumn.of(RaggedValues(column, data, np.array([0, 1, size])))
    received = through_pipe({"tokens": ragged, "names": ["a", "b"], "nested": {"x": torch.ones(2)}}, SharedBuffers())
    assert received["tokens"].column == column
    assert received["tokens"].values.equal(ragged.values)
    assert received["tokens"].offsets.tolist() == [0, 1, size]
    assert received["names"] == ["a", "b"]
    assert received["nested"]["x"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_that_are_more_than_their_bytes_are_received_as_they_were() -> None:
    parameter = torch.nn.Parameter(torch.ones(100_000))
    sent = {
        "parameter": parameter,
        "sparse": torch.eye(3).to_sparse(),
        "transposed": torch.arange(200_000).reshape(2, -1).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    received = through_pipe(sent, SharedBuffers())
    assert type(received["parameter"]) is torch.nn.Parameter
    assert received["sparse"].is_sparse
    for name, tensor in sent.items():
        assert received[name].to_dense().equal(tensor.to_dense().detach())
        assert received[name].requires_grad == tensor.requires_grad


def test_what_is_received_can_be_written_to() -> None:
    buffers = SharedBuffers()
    received = through_pipe({"small": torch.ones(3), "large": filled(1, buffers)}, buffers)
    received["small"] += 1
    received["large"] += 1
    assert received["small"].tolist() == [2, 2, 2]
    assert int(received["large"].sum()) == 2 * LARGE


def test_a_gather_into_a_buffer_is_sent_without_a_copy_and_others_are_copied() -> None:
    buffers = SharedBuffers()
    received = through_pipe({"gathered": filled(7, buffers)}, buffers)
    assert count_buffers(buffers) == 1
    others = through_pipe({"made": torch.full((LARGE,), 8, dtype=torch.uint8)}, buffers)
    assert count_buffers(buffers) == 2
    assert (int(received["gathered"][-1]), int(others["made"][-1])) == (7, 8)


def test_a_dropped_batch_leaves_its_buffers_to_the_next() -> None:
    buffers = SharedBuffers()
    for value in range(20):
        columns = {"x": filled(value, buffers), "y": torch.full((5000,), value)}
        received = through_pipe(columns, buffers)
        assert received["x"].unique().tolist() == received["y"].unique().tolist() == [value]
        del columns, received
    assert count_buffers(buffers) == 2


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[2:3],
        lambda tensor: tensor.view(torch.float32).reshape(2, -1),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor[5].numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.detach(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: (tensor.view(torch.float32).requires_grad_() * tensor.view(torch.float32)).grad_fn,
    ],
)
def test_whatever_is_made_of_a_received_tensor_keeps_its_buffer(hold: Callable[[torch.Tensor], Any]) -> None:
    buffers = SharedBuffers()
    held = hold(through_pipe({"x": filled(1, buffers)}, buffers)["x"])
    for _ in range(3):
        through_pipe({"x": filled(2, buffers)}, buffers)
    assert count_buffers(buffers) == 2
    del held
    gc.collect()
    first, second = filled(3, buffers), filled(4, buffers)
    assert count_buffers(buffers) == 2
    del first, second


def test_a_tensor_that_the_worker_keeps_is_not_written_over() -> None:
    buffers = SharedBuffers()
    kept = filled(1, buffers)
    through_pipe({"x": kept}, buffers)
    through_pipe({"x": filled(2, buffers)}, buffers)
    assert int(kept.max()) == 1


def test_a_tensor_that_is_sent_twice_is_received_twice() -> None:
    buffers = SharedBuffers()
    tensor = filled(1, buffers)
    first = through_pipe({"x": tensor, "same": tensor}, buffers)
    first["x"] += 1
    assert int(first["same"].max()) == 1
    second = through_pipe({"x": tensor}, buffers)
    del first
    third = through_pipe({"x": filled(9, buffers)}, buffers)
    assert int(second["x"].max()) < 9
    assert int(third["x"].min()) == 9


def test_batches_beyond_the_buffers_are_sent_through_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_batches, "_MAX_BUFFERS", 3)
    buffers = SharedBuffers()
    held = [through_pipe({"x": filled(value, buffers, 300_000)}, buffers) for value in range(8)]
    assert count_buffers(buffers) == 3
    assert [batch["x"].unique().tolist() for batch in held] == [[value] for value in range(8)]


def test_without_shared_memory_batches_are_sent_through_the_pipe_and_one_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    buffers = SharedBuffers()
    through_pipe({"x": filled(1, buffers)}, buffers)
    monkeypatch.setattr(os, "memfd_create", fail)
    held = [through_pipe({"x": filled(value, buffers), "y": torch.ones(9000)}, buffers) for value in range(3)]
    assert [batch["x"].unique().tolist() for batch in held] == [[0], [1], [2]]
    (record,) = caplog.records
    assert re.search(r"process \d+ got no shared memory after 1 buffers: .*Too many open files.*ulimit", record.message)


def test_a_smaller_batch_takes_a_larger_buffer_and_a_larger_one_a_new_one() -> None:
    buffers = SharedBuffers()
    for size in (LARGE, LARGE // 2, LARGE // 3):
        through_pipe({"x": filled(1, buffers, size)}, buffers)
    assert count_buffers(buffers) == 1
    through_pipe({"x": filled(1, buffers, 5 * LARGE)}, buffers)
    assert count_buffers(buffers) == 2


def test_rows_are_gathered_as_elsewhere() -> None:
    memory = memoryview(bytearray(np.random.default_rng(0).bytes(100_000)))
    buffers = SharedBuffers()
    for row_bytes, count in ((8, 100), (2000, 10), (2000, 500)):
        addresses = np.random.default_rng(1).integers(0, len(memory) - row_bytes + 1, count)
        rows = buffers.gather_rows(memory, addresses, row_bytes)
        assert np.array_equal(rows, plain_gather(memory, addresses, row_bytes))
    assert count_buffers(buffers) == 1
    with pytest.raises(IndexError):
        buffers.gather_rows(memory, np.full(500, len(memory) - 1999), 2000)


def test_copies_and_other_pickles_are_dictionaries() -> None:
    batch = SharedBatch({"x": torch.ones(100_000)}, SharedBuffers())
    assert type(copy.copy(batch)) is SharedBatch
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):  # noqa: S301 - its own
        assert type(other) is dict
        assert other["x"].equal(batch["x"])
        assert other["x"].data_ptr() != batch["x"].data_ptr()


def test_a_forked_process_gives_no_buffer_back() -> None:
    buffers = SharedBuffers()
    received = through_pipe({"x": filled(1, buffers)}, buffers)
    pid = os.fork()
    if pid == 0:
        del received
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    through_pipe({"x": filled(2, buffers)}, buffers)
    assert count_buffers(buffers) == 2
    assert int(received["x"].max()) == 1


def ended_process() -> int:
    """Return the number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_buffers_of_a_worker_that_has_ended_are_forgotten_and_its_batches_stay_valid() -> None:
    buffers = SharedBuffers()
    buffers._owner = ended_process(), 1
    received = through_pipe({"x": filled(1, buffers)}, buffers)
    assert list(_shared_batches._mappings) == [buffers._owner]
    mapping = weakref.ref(_shared_batches._mappings[buffers._owner][0])
    _shared_batches.forget_ended_workers()
    assert not _shared_batches._mappings
    assert int(received["x"].sum()) == LARGE
    del received
    gc.collect()
    assert mapping() is None


def test_a_batch_of_a_worker_that_has_been_forgotten_is_an_error_that_names_it() -> None:
    buffers = SharedBuffers()
    through_pipe({"x": filled(1, buffers)}, buffers)
    _shared_batches._mappings.clear()
    with pytest.raises(StokerError, match=rf"worker process {os.getpid()} ended before its batch was received"):
        through_pipe({"x": filled(2, buffers)}, buffers)


def test_systems_without_memory_files_use_a_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    buffers = SharedBuffers()
    assert int(through_pipe({"x": filled(3, buffers)}, buffers)["x"].sum()) == 3 * LARGE


@pytest.mark.parametrize("error", [ConnectionResetError(), ConnectionRefusedError(), FileNotFoundError(), EOFError()])
def test_a_worker_that_ends_before_it_has_sent_a_file_descriptor_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(resource_sharer.DupFd, "detach", fail)
    buffers = SharedBuffers()
    with pytest.raises(StokerError, match=rf"worker process {os.getpid()} ended before its batch was received"):
        through_pipe({"x": filled(1, buffers)}, buffers)


def test_no_worker_is_blamed_if_this_process_has_no_file_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(resource_sharer.DupFd, "detach", fail)
    buffers = SharedBuffers()
    with pytest.raises(OSError, match="too many open files"):
        through_pipe({"x": filled(1, buffers)}, buffers)
