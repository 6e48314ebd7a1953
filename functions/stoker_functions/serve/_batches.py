"""Answers that are a batch: samples of an epoch, from wherever they lie, as one super-sample file."""

from __future__ import annotations

import hashlib
import json

from stoker._fetch.samples import SampleReader
from stoker._format.manifest import Manifest
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, Origin, SuperSampleBuilder
from stoker._order.order import Order
from stoker_functions.serve._messages import Refusal
from stoker_functions.serve._routing import BatchAsk

__all__ = ["batch_id", "check_position", "read_batch"]


_HEADER_BYTES = 2048  # rounded up, without what depends on the columns
_HEADER_BYTES_OF_COLUMN = 256  # two tensors' types, shapes and offsets
_HEADER_SHARE_OF_SCHEMA = 4  # it stands there in quotes, and the names in it once or twice more


def batch_id(manifest: Manifest, ask: BatchAsk) -> str:
    """Return what stands for the bytes of a batch: 32 hexadecimal digits, the same for the same bytes."""
    order = ask.order
    said = (
        FORMAT,
        manifest.dataset,
        manifest.version,
        (order.seed, order.shuffle, order.window, order.lanes),
        (ask.epoch, ask.position, ask.size),
    )
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def check_position(manifest: Manifest, ask: BatchAsk) -> None:
    """Raise Refusal if an epoch has no such position."""
    if ask.position >= manifest.samples:
        raise Refusal(404, "no-such-position", f"an epoch has positions 0 to {manifest.samples - 1}")


async def read_batch(manifest: Manifest, reader: SampleReader, ask: BatchAsk, limit_bytes: int) -> bytes:
    """Return a batch as a safetensors file with the columns of the data set; an epoch's last may have fewer samples.

    No more is read than would fit: about as many samples at a time as fit if they are like the others.

    Raises:
        Refusal: the file would have more than ``limit_bytes``; says what fits.
        StoreError: samples could not be had.
    """
    order = Order(manifest.rows.samples, ask.order, ask.epoch)
    samples = order.at(ask.position, min(ask.position + ask.size, order.samples))
    builder = SuperSampleBuilder(manifest.schema)
    room_bytes = limit_bytes - _header_bytes(manifest.schema)
    at_a_time = max(1, room_bytes * manifest.samples // manifest.size_bytes)
    for first in range(0, len(samples), at_a_time):
        for sample in await reader.read(samples[first : first + at_a_time]):
            values = manifest.schema.encode(sample)
            if builder.size_with(values) > room_bytes:
                raise Refusal(413, "too-large", _advice(len(builder), limit_bytes))
            builder.add(values)
    origin = Origin(dataset=manifest.dataset, run=batch_id(manifest, ask)[:16], ordinal=0)
    data, _ = builder.finish(origin)
    return data


def _header_bytes(schema: Schema) -> int:
    """Return what a file has before its data, at most."""
    named_bytes = _HEADER_BYTES_OF_COLUMN * len(schema) + _HEADER_SHARE_OF_SCHEMA * len(schema.to_json())
    return _HEADER_BYTES + named_bytes


def _advice(fitting: int, limit_bytes: int) -> str:
    if not fitting:
        return f"the first sample alone has more than the {limit_bytes} bytes of an answer: read its super-sample"
    return f"the batch has more than the {limit_bytes} bytes of an answer; size={fitting} fits at this position"
