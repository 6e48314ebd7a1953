"""Samples in files on a local disk, first in, first out, for one process that writes and many that read.

Only the process that made the cache writes. It keeps the order in memory, so folders are never listed, and readers need
only a path. A file is written under another name and renamed, so it is always complete, and it is checked when it is
read; a reader that finds no file, or a damaged one, has a miss.

The folder belongs to one process and is removed with it. The folder itself is locked (``flock``), so there are no lock
files, and a killed process leaves no lock.

A sample is stored without pickle, so that decoding a file never runs code. It is encoded as
``magic · version · structure length · total length · structure · values``. The structure is JSON: null, booleans,
numbers and strings stand for themselves, and everything else is a list that starts with a tag: ``["list", …]``,
``["tuple", …]``, ``["dict", {…}]``, ``["bytes", length]``, ``["tensor" | "array" | "scalar", dtype, shape]``. The
values of the last four follow in the order of the structure, each at a multiple of 8 bytes, so the file contains no
offsets and no two values can overlap.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker._base.checksum import crc32c
from stoker.errors import ConfigError, FormatError, SampleError, StokerError
from stoker_torch._sample_cache import DamagedEntryError, SampleCache, SharedCounts, lock_path

MAX_DEPTH = 32
_MAX_DIMENSIONS = 32
_MAX_SIZE = 1 << 48
_PREFIX = struct.Struct("<4sHxxIxxxxQ")
_MAGIC = b"SKSM"
_VERSION = 1
_ALIGNMENT_BYTES = 8

_TENSOR_NAMES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 bfloat16
    float8_e4m3fn float8_e5m2 complex64 complex128"""
_TENSOR_DTYPES = {name: getattr(torch, name) for name in _TENSOR_NAMES.split()}
_TENSOR_CODES = {dtype: name for name, dtype in _TENSOR_DTYPES.items()}
_ARRAY_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU]\d{1,9}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}\])?)", re.ASCII)
"""numpy's spelling of booleans, numbers, fixed-size text and dates; nothing with fields or objects."""

Buffer = bytes | memoryview


def encode_sample(sample: Any) -> bytearray:
    """Return a sample as bytes.

    Args:
        sample: tensors (dense, on the CPU, without gradient), numpy arrays and scalars, bytes, str, int, float, bool
            and None, and tuples, lists and dicts with str keys of these, nested at most 32 deep. Subclasses of these
            types (a named tuple, a parameter) are refused, since they would be decoded as another type; only an
            ``np.memmap``, the type of slices of files, counts as an array. Arrays and tensors keep their bits.

    Raises:
        SampleError: the sample contains another type; the message names the type and where it is.
    """
    values: list[Buffer] = []
    try:
        structure = json.dumps(_describe_value(sample, values, "sample", MAX_DEPTH), separators=(",", ":")).encode()
    except ValueError as error:  # an int of thousands of digits
        raise SampleError(f"the sample cannot be stored: {error}") from error
    if len(structure) >= 1 << 32:
        raise SampleError(
            f"the sample's text and numbers take {len(structure)} bytes, and less than 4 GiB can be stored; use arrays "
            "for them"
        )
    parts: list[Buffer] = [structure, bytes(_padding(len(structure)))]
    for value in values:
        parts += value, bytes(_padding(len(value)))
    total_bytes = _PREFIX.size + sum(map(len, parts))
    return bytearray().join([_PREFIX.pack(_MAGIC, _VERSION, len(structure), total_bytes), *parts])


def decode_sample(data: bytearray | bytes, start: int = 0) -> Any:
    """Return the sample that :func:`encode_sample` encoded as ``data``.

    Args:
        data: encoded bytes; if they are a ``bytearray``, tensors and arrays are views of it, else of a copy.
        start: offset in ``data`` where the sample begins, a multiple of 8.

    Raises:
        FormatError: ``data`` is not exactly one encoded sample of this version. Decoding invalid bytes takes at most a
            few times their size in memory.
    """
    reader = _SampleReader(data if isinstance(data, bytearray) else bytearray(data), start)
    try:
        structure = json.loads(reader.structure().decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a sample's structure is not valid JSON: {str(error)[:200]}") from None
    sample = _rebuild_value(structure, reader, MAX_DEPTH)
    reader.end()
    return sample


def _padding(size_bytes: int) -> int:
    return -size_bytes % _ALIGNMENT_BYTES


def _describe_value(value: Any, values: list[Buffer], path: str, depth: int) -> Any:
    """Return the structure of a value, and append its bytes to ``values``."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth == 0:
        raise SampleError(
            f"{path[:200]} is nested more than {MAX_DEPTH} deep, or contains itself; flatten it with encode="
        )
    if kind in (list, tuple):
        inner = [_describe_value(item, values, f"{path}[{number}]", depth - 1) for number, item in enumerate(value)]
        return [kind.__name__, *inner]
    if kind is dict:
        if unusual := [key for key in value if type(key) is not str]:
            raise _unsupported_error(f"the key {unusual[0]!r:.80} of {path}", unusual[0])
        return [
            "dict",
            {key: _describe_value(item, values, f"{path}[{key!r}]", depth - 1) for key, item in value.items()},
        ]
    return _describe_bytes(value, values, path)


def _describe_bytes(value: Any, values: list[Buffer], path: str) -> list[Any]:
    """Return the structure of bytes, a tensor, an array or a scalar, and append its bytes to ``values``."""
    if type(value) is bytes:
        values.append(value)
        return ["bytes", len(value)]
    if type(value) is torch.Tensor:
        return ["tensor", *_describe_tensor(value, values, path)]
    if type(value) not in (np.ndarray, np.memmap) and not isinstance(value, np.generic):
        raise _unsupported_error(path, value)
    if not _ARRAY_DTYPE.fullmatch(value.dtype.str) or value.ndim > _MAX_DIMENSIONS:
        raise _unsupported_error(path, value, f" of dtype {value.dtype} and {value.ndim} dimensions")
    values.append(value.tobytes())
    return ["scalar" if isinstance(value, np.generic) else "array", value.dtype.str, list(value.shape)]


def _describe_tensor(tensor: torch.Tensor, values: list[Buffer], path: str) -> tuple[str, list[int]]:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not dense or tensor.dtype not in _TENSOR_CODES or tensor.dim() > _MAX_DIMENSIONS:
        details = f" of {tensor.dtype}, {tensor.layout}, on {tensor.device}, requires_grad={tensor.requires_grad}"
        raise _unsupported_error(path, tensor, details)
    # clone(), since contiguous() keeps the strides of tensors with at most one element, and view(uint8) refuses some.
    flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    values.append(flat.view(torch.uint8).numpy().data)
    return _TENSOR_CODES[tensor.dtype], list(tensor.shape)


def _unsupported_error(path: str, value: object, details: str = "") -> SampleError:
    kind = type(value)
    return SampleError(
        f"{path[:200]} is a {kind.__module__}.{kind.__qualname__}{details}, which cannot be stored without pickle; "
        "turn it into tensors, arrays, bytes, numbers, strings, tuples, lists or dicts of these in the dataset, or "
        "with encode= and decode="
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is repeated")
    return entries


class _SampleReader:
    """Reads the bytes of an encoded sample once, from front to back."""

    def __init__(self, data: bytearray, start: int) -> None:
        self._data = data
        self._offset = start

    def take(self, size_bytes: int) -> int:
        """Return the offset of the next ``size_bytes`` bytes, and skip them and their padding."""
        start, end = self._offset, self._offset + size_bytes
        self._offset = end + _padding(end)
        if self._offset > len(self._data) or any(self._data[end : self._offset]):
            raise FormatError(f"a sample of {len(self._data)} bytes has no value of {size_bytes} bytes at {start}")
        return start

    def structure(self) -> bytearray:
        """Return the JSON text."""
        size_bytes = len(self._data) - self._offset
        if size_bytes < _PREFIX.size:
            raise FormatError(f"{size_bytes} bytes are too few for a sample")
        magic, version, structure_bytes, total_bytes = _PREFIX.unpack_from(self._data, self._offset)
        if magic != _MAGIC or version != _VERSION:
            raise FormatError(f"a sample starts with {_MAGIC!r} and version {_VERSION}, not {magic!r} and {version}")
        if total_bytes != size_bytes:
            raise FormatError(f"a sample of {total_bytes} bytes has {size_bytes}")
        self._offset += _PREFIX.size
        start = self.take(structure_bytes)
        return self._data[start : start + structure_bytes]

    def array(self, dtype: np.dtype[Any], shape: Any) -> np.ndarray[Any, Any]:
        """Return the next value as an array."""
        start = self.take(_count_elements(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=self._data, offset=start)

    def end(self) -> None:
        """Check that no bytes are left."""
        if self._offset != len(self._data):
            raise FormatError(f"{len(self._data) - self._offset} bytes follow the last value of a sample")


def _count_elements(shape: Any) -> int:
    """Return the number of elements of a shape."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{shape!r:.80} is not the shape of an array in a sample")
    if any(type(size) is not int or not 0 <= size < _MAX_SIZE for size in shape):
        raise FormatError(f"the shape {shape!r:.80} of an array in a sample has an invalid size")
    if math.prod(filter(None, shape)) >= _MAX_SIZE:  # also of an empty array, whose strides must not overflow
        raise FormatError(f"the shape {shape!r:.80} of an array in a sample overflows")
    return math.prod(shape)


def _parse_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a name."""
    with contextlib.suppress(TypeError, ValueError):  # a size or unit that numpy does not have
        if _ARRAY_DTYPE.fullmatch(name):
            return np.dtype(name)
    raise FormatError(f"unknown dtype {name!r:.80} of an array in a sample")


def _read_tensor(name: str, shape: Any, reader: _SampleReader) -> torch.Tensor:
    dtype = _TENSOR_DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"unknown dtype {name!r:.80} of a tensor in a sample")
    elements = reader.array(np.dtype(f"V{dtype.itemsize}"), shape).reshape(-1)
    return torch.from_numpy(elements.view(np.uint8)).view(dtype).reshape(shape)


def _rebuild_value(structure: Any, reader: _SampleReader, depth: int) -> Any:
    """Return the value that a structure describes."""
    if not isinstance(structure, list | dict):
        return structure
    match structure if depth else None:
        case ["list", *items]:
            return [_rebuild_value(item, reader, depth - 1) for item in items]
        case ["tuple", *items]:
            return tuple([_rebuild_value(item, reader, depth - 1) for item in items])
        case ["dict", dict(entries)]:
            return {key: _rebuild_value(item, reader, depth - 1) for key, item in entries.items()}
        case ["bytes", size]:
            return reader.array(np.dtype(np.uint8), [size]).tobytes()
        case ["tensor", str(name), shape]:
            return _read_tensor(name, shape, reader)
        case ["array", str(name), shape]:
            return reader.array(_parse_dtype(name), shape)
        case ["scalar", str(name), []]:
            return reader.array(_parse_dtype(name), [])[()]
    raise FormatError(f"{structure!r:.80} is not a structure of a sample, or nested too deep")


_SESSION_FOLDER = re.compile(r"stoker-cache-[0-9a-f]{16}", re.ASCII)
"""Names of the folders of sessions; nothing else is ever removed."""


def _begin_session(path: Path) -> tuple[Path, int]:
    """Make a folder for this session in ``path``, and remove the folders of sessions that have ended.

    Returns:
        The folder, and the file descriptor that holds its lock while this process lives.

    Raises:
        OSError: ``path`` is not a folder that can be made, written to and locked.
    """
    path.mkdir(parents=True, exist_ok=True)
    with lock_path(path):  # or another new session could remove a folder that is not locked yet
        for left in path.iterdir():
            if _SESSION_FOLDER.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                with contextlib.suppress(OSError), lock_path(left, wait=False):  # skips a folder that is in use
                    shutil.rmtree(left)
        folder = path / f"stoker-cache-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


_KEY = struct.Struct("<Qq")  # session, index
_FRAME_BYTES = _KEY.size + 8  # with the checksum, in 8 bytes to keep values aligned
_BLOCK_BYTES = 4096


class DiskCache(SampleCache):
    """A bounded cache of samples on disk, which the worker processes of a ``DataLoader`` share.

    Each cache has its own folder in ``path``, so ranks of one node may share a ``path``. The folder is removed when the
    cache is closed or garbage-collected, or the interpreter ends; the folder of a killed process is removed when the
    next cache is made at the same ``path``. A forked or spawned process gets a reader.

    Args:
        path: folder on a local disk, which is made if it does not exist.
        samples: maximum number of samples.
        max_bytes: maximum disk space of all samples, a number or ``"20GB"``, counted in blocks of 4 KiB; default no
            limit.
        encode: function of a sample that returns a value that can be stored without pickle: tensors, numpy arrays and
            scalars, bytes, str, int, float, bool and None, and tuples, lists and dicts of these. Default: the sample
            is such a value.
        decode: inverse function of ``encode``, given together with it.

    Raises:
        ConfigError: a limit is not positive, or ``path`` is not a folder that can be written to and locked.

    Example:
        >>> with DiskCache("samples", 100_000, max_bytes="20GB") as cache:
        ...     image, label = CachedDataset(images, cache)[0]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        samples: int,
        *,
        max_bytes: int | str | None = None,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(samples, max_bytes)
        if (encode is None) != (decode is None):
            raise ConfigError("encode= and decode= are inverse functions of each other: give both or neither")
        self._encode, self._decode = encode, decode
        try:
            self._folder, lock = _begin_session(Path(path).absolute())
        except OSError as error:
            raise ConfigError(f"a DiskCache cannot use {path}: give it a folder on a local disk ({error})") from error
        self._session = int(self._folder.name[-16:], 16)  # a random number of 64 bits
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(
            self, _remove_session, self._pid, self._write_lock, self._folder, lock
        )
        self.counts: SharedCounts = SharedCounts(self._folder / "counts")

    def get(self, index: int) -> Any:
        """Return a sample; may be called in every process.

        Raises:
            KeyError: the sample is not in the cache; :class:`DamagedEntryError` if its file cannot be read or is
                damaged.
            SampleError: ``decode`` failed.
        """
        try:
            with (self._folder / str(index)).open("rb", buffering=0) as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(data)
            sample = self._verify_sample(index, data)
        except FileNotFoundError:
            raise KeyError(index) from None
        except (OSError, FormatError) as error:
            raise DamagedEntryError(index) from error
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            raise SampleError(f"sample {index} cannot be decoded from disk: {error}") from error

    def close(self) -> None:
        """Remove all files; from then on, other processes have only misses. Idempotent."""
        super().close()
        if self._finalizer is not None:
            self.counts.read()
            self._finalizer()

    def __repr__(self) -> str:
        return f"<DiskCache of {self.samples} samples in {self._folder}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a reader in another process needs, without locks."""
        state = {
            name: value for name, value in self.__dict__.items() if name not in ("_write_lock", "_index_lock", "_sizes")
        }
        return state | {"_pid": -1, "_finalizer": None}

    def _check_own(self) -> None:
        if not self.is_own:
            raise StokerError("this DiskCache is a reader: only the process that made it can write to it")

    def _encode_entry(self, index: int, sample: Any) -> tuple[tuple[bytes, bytearray], int]:
        try:
            data = encode_sample(sample if self._encode is None else self._encode(sample))
        except Exception as error:
            raise SampleError(f"sample {index} cannot be stored on disk: {error}") from error
        parts = self._frame_header(index, data), data
        return parts, -(-sum(map(len, parts)) // _BLOCK_BYTES) * _BLOCK_BYTES

    def _write(self, index: int, entry: tuple[bytes, bytearray]) -> None:
        writing = self._folder / "writing"
        try:
            with writing.open("wb") as file:
                file.writelines(entry)
            writing.rename(self._folder / str(index))
        except OSError:
            with contextlib.suppress(OSError):
                writing.unlink()
            raise

    def _remove(self, index: int) -> None:
        (self._folder / str(index)).unlink(missing_ok=True)

    def _frame_header(self, index: int, data: bytearray | memoryview) -> bytes:
        """Return the frame before an encoded sample: session, index, and the checksum of these and the sample."""
        key = _KEY.pack(self._session, index)
        return key + crc32c(data, crc32c(key)).to_bytes(_FRAME_BYTES - len(key), "little")

    def _verify_sample(self, index: int, data: bytearray) -> Any:
        """Return the sample in a file.

        Raises:
            FormatError: the file is not the one that was written for this sample.
        """
        if data[:_FRAME_BYTES] != self._frame_header(index, memoryview(data)[_FRAME_BYTES:]):
            raise FormatError(f"{self._folder / str(index)} is damaged")
        return decode_sample(data, _FRAME_BYTES)


def _remove_session(pid: int, writing: threading.Lock, folder: Path, lock: int) -> None:
    if pid == os.getpid():  # a forked child has a copy of this finalizer, and must not remove its parent's files
        with writing:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
