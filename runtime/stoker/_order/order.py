"""The order: the exact sequence of an epoch's samples, computed in advance, identical on every machine.

The epoch's super-samples are permuted, concatenated, and cut into ``lanes`` parts of equal length ±1 sample, the longer
ones first. Position ``p`` of the epoch is place ``p // lanes`` of lane ``p % lanes``. A lane is a sequence of
**pieces**: whole super-samples, except for those that a cut divides (at most ``lanes - 1`` in the epoch). It is
delivered in **blocks**, each the permuted union of parts of consecutive pieces:

- ``none``: super-samples in packed order; block ``i`` is piece ``i`` in packed order.
- ``block``: block ``i`` is pieces ``[i w, (i + 1) w)``, where ``w`` is the window (DIESEL's chunk-based shuffle).
- ``window``: each piece is permuted by itself and cut into ``G`` parts; part ``g`` of piece ``i``, its places
  ``[⌊g n / G⌋, ⌊(g + 1) n / G⌋)`` of ``n``, goes to block ``i + g``. So ``G`` pieces are in memory at any time, and no
  group borders separate neighbours. ``G`` is the window, but at most half of the lane's pieces (rounded down), and at
  least 1.
- ``full``: one keyed permutation of all samples (see :mod:`stoker._order.random_words`), without lanes and pieces.

With ``sticky``, most super-samples stay in their lane of the epoch before (see :mod:`stoker._order.sticky`).

With ``unit_bytes``, ``window`` permutes units, which are runs of a super-sample's rows (see
:mod:`stoker._order.units`): the order is that of a data set whose super-samples are the units. In this module, a
super-sample is then a unit.

:func:`stoker._order.random_words.permutation` draws each permutation; its element ``k`` is delivered at place ``k``.
The streams (purpose, index, part) are:

- ``(SUPER_SAMPLES, 0, 0)`` permutes the manifest's super-samples (``block`` and ``window``);
- ``(ROWS, super-sample, first row)`` permutes a piece's rows (``window`` with ``G > 1``); the super-sample is its
  number in the manifest, the row its number in the super-sample;
- ``(BLOCK, block, lane)`` permutes a block (``block`` and ``window``), starting from the order of its pieces;
- ``(FULL, 0, 0)`` is the round keys of ``full``, which maps a position to a sample's number in packed order;
- ``(PACK, 0, 0)``, in epoch 0, is those of ``pack --shuffle``, which maps a packed sample to its number in the source.

Any place is located in O(super-samples), and blocks are computed on demand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import AtLeastOne, BoundedConfig, NumberBound
from stoker._base.computed import cached_property
from stoker._base.sizes import format_bytes
from stoker._format.manifest import Manifest, sample_starts
from stoker._order.random_words import FeistelPermutation, Purpose, permutation, words
from stoker._order.sticky import MAX_STICKY, sort_by_home
from stoker._order.units import Units
from stoker.errors import ConfigError

Shuffle = Literal["none", "block", "window", "full"]
MAX_LANES = 1 << 16
MAX_UNIT_BYTES = 1 << 30
DEFAULT_WINDOW = 8
DEFAULT_UNIT_WINDOW = 256
"""Units that are mixed at a time: with units of 1 MiB, the memory of 8 super-samples of 32 MiB."""
_BY_UNIT: Any = None
"""Default of a window that depends on the unit."""
_PIECES_AT_ONCE = 1 << 15
"""Pieces whose blocks are computed at once: few enough for the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig(BoundedConfig):
    """Settings that determine the order, together with the manifest's version and the epoch.

    Attributes:
        seed: seed from 0 (default) to 2**64 - 1; ignored by shuffle ``none``.
        shuffle: ``none``, ``block``, ``window`` (default) or ``full``.
        window: number of super-samples, or with ``unit_bytes`` of units, that are mixed at a time, per lane; default 8
            super-samples or 256 units.
        lanes: number of parts into which an epoch is cut, 1 (default) to 65,536; fixed for a run, for any number of
            ranks.
        unit_bytes: size of the units that ``window`` permutes and mixes, 1 to 2**30 bytes; a unit is a run of rows of
            one super-sample with about this size. None (default) for whole super-samples.
        sticky: probability that a super-sample stays in its lane of the epoch before, 0 (default) to 0.99, in steps of
            a millionth.

    Raises:
        ConfigError: a value is out of range, ``unit_bytes`` is given for another shuffle than ``window``, or ``sticky``
            for units or a shuffle other than ``window`` and ``block``.

    Example:
        >>> OrderConfig(seed=17, shuffle="block", window=16).lanes
        1
    """

    seed: Annotated[int, NumberBound(">=", 0), NumberBound("<", 1 << 64)] = 0
    shuffle: Shuffle = "window"
    window: AtLeastOne[int] = _BY_UNIT
    lanes: Annotated[int, NumberBound(">=", 1), NumberBound("<=", MAX_LANES)] = 1
    unit_bytes: Annotated[int, NumberBound(">=", 1), NumberBound("<=", MAX_UNIT_BYTES)] | None = None
    sticky: Annotated[float, NumberBound(">=", 0), NumberBound("<=", MAX_STICKY)] = 0.0

    def __post_init__(self) -> None:
        given: object = self.window
        if given is None:
            object.__setattr__(self, "window", DEFAULT_WINDOW if self.unit_bytes is None else DEFAULT_UNIT_WINDOW)
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        object.__setattr__(self, "sticky", float(self.sticky))  # JSON and states do not take numpy's
        if self.unit_bytes is not None and self.shuffle != "window":
            raise ConfigError(
                f"a unit of {self.unit_bytes} bytes cannot be used with shuffle {self.shuffle!r}: only 'window' "
                "permutes units; use shuffle 'window', or no unit"
            )
        if self.sticky and (self.unit_bytes is not None or self.shuffle not in ("window", "block")):
            order = f"shuffle {self.shuffle!r}" if self.unit_bytes is None else "units"
            raise ConfigError(
                f"sticky={self.sticky:g} cannot be used with {order}: only 'window' and 'block' of whole super-samples "
                "keep them in lanes; leave sticky out, or use one of these"
            )


def format_window(window: int, unit_bytes: int | None, sticky: float = 0.0) -> str:
    """Format a window, such as ``window 8``, ``window 8, sticky 0.9`` or ``window 256 units of 1.00 MiB``."""
    units = "" if unit_bytes is None else f" units of {format_bytes(unit_bytes)}"
    return f"window {window}{units}{f', sticky {sticky:g}' if sticky else ''}"


@dataclass(frozen=True, slots=True)
class Block:
    """The samples of one delivery block, in order of delivery.

    Attributes:
        pieces: pieces of the lane that have samples in this block, ascending, ``int64 [pieces]``.
        piece_indices: index of each sample's piece in ``pieces``, ``int64 [samples]``.
        rows: row of each sample in its super-sample or unit, ``int64 [samples]``.
    """

    pieces: NDArray[np.int64]
    piece_indices: NDArray[np.int64]
    rows: NDArray[np.int64]


class Order:
    """The order of one epoch.

    Args:
        samples: number of samples in each super-sample, in the manifest's order, integer ``[super-samples]``; or the
            units of a data set, which a config with ``unit_bytes`` requires: see :meth:`of`.
        config: seed, shuffle, window, lanes and unit.
        epoch: number of the epoch, from 0.

    Raises:
        ConfigError: ``samples`` are not the units of the config.

    Example:
        >>> import numpy as np
        >>> Order(np.array([2, 2]), OrderConfig(shuffle="none"), epoch=0).at(1, 4)
        array([1, 2, 3])
    """

    def __init__(self, samples: NDArray[np.integer] | Units, config: OrderConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self._units = samples if isinstance(samples, Units) else Units(samples)
        if self._units.unit_bytes != config.unit_bytes:
            raise ConfigError(
                f"the samples are given by units of {self._units.unit_bytes} bytes (None: by super-sample), and the "
                f"order has unit_bytes={config.unit_bytes}; use Order.of(manifest, config, epoch)"
            )
        self._counts = self._units.samples
        self.samples = int(self._counts.sum(dtype=np.int64))
        self._lanes = WeakValueDictionary[int, Lane]()  # lanes refer to the order: no cycle may keep its arrays

    @classmethod
    def of(cls, manifest: Manifest, config: OrderConfig, epoch: int) -> Order:
        """Return the order of an epoch of a data set, with any config.

        Args:
            manifest: index of the data set.
            config: seed, shuffle, window, lanes and unit.
            epoch: number of the epoch, from 0.
        """
        return cls(Units.of(manifest.rows, config.unit_bytes), config, epoch)

    @cached_property
    def _packed_starts(self) -> NDArray[np.int64]:
        """Number of samples before each super-sample or unit in packed order, ``int64 [units + 1]``."""
        return sample_starts(self._counts)

    @cached_property
    def _sequence(self) -> NDArray[np.uint32]:
        """Super-samples in the order of the epoch; not for ``full``."""
        if self.config.shuffle == "none":
            return np.arange(len(self._counts), dtype=np.uint32)
        sequence = _permutation(self, len(self._counts), Purpose.SUPER_SAMPLES).astype(np.uint32)
        if not (sticky := self.config.sticky):
            return sequence
        seed, lanes = self.config.seed, self.config.lanes
        return sort_by_home(sequence, self._counts, sticky=sticky, lanes=lanes, seed=seed, epoch=self.epoch)

    @cached_property
    def _sequence_starts(self) -> NDArray[np.int64]:
        """Number of samples before each element of ``_sequence``, ``int64 [super-samples + 1]``."""
        return sample_starts(self._counts[self._sequence])

    @property
    def lanes(self) -> int:
        """Number of lanes of the epoch; 1 for ``full``."""
        return 1 if self.config.shuffle == "full" else self.config.lanes

    def lane_samples(self, lane: int) -> int:
        """Return the number of samples in a lane: the positions ``p`` with ``p % lanes == lane``."""
        return (self.samples - lane + self.lanes - 1) // self.lanes

    def lane(self, lane: int) -> Lane:
        """Return one lane, by number from 0; not for ``full``. A lane is computed once while it is in use."""
        found = self._lanes.get(lane)
        if found is None:
            base, extra = divmod(self.samples, self.lanes)
            start = lane * base + min(lane, extra)
            end = start + self.lane_samples(lane)
            first = int(np.searchsorted(self._sequence_starts, start, "right")) - 1
            last = max(first, int(np.searchsorted(self._sequence_starts, end, "left")))
            pieces = self._sequence[first:last]
            counts = self._counts[pieces]
            first_row = start - int(self._sequence_starts[first])
            if len(counts):
                counts[-1] -= int(self._sequence_starts[last]) - end
                counts[0] -= first_row
            if not counts.all():  # super-samples without samples
                pieces, counts = pieces[counts > 0], counts[counts > 0]
            found = self._lanes[lane] = Lane(self, lane, pieces, counts, first_row)
        return found

    def feistel(self) -> FeistelPermutation:
        """Return the permutation of ``full``, from position to sample number in packed order."""
        return keyed_permutation(self, Purpose.FULL)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return super-sample and row, ``int64 [samples]`` each, of samples given by number in packed order."""
        units = np.searchsorted(self._packed_starts, samples, "right") - 1
        super_samples, rows = self._units.locate(units, samples - self._packed_starts[units])
        return super_samples.astype(np.int64, copy=False), rows

    def sample_ids(self, super_samples: NDArray[np.integer], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples as numbers in packed order, given by super-sample and row, or with ``unit_bytes`` by unit."""
        ids: NDArray[np.int64] = self._packed_starts[super_samples] + rows
        return ids

    def at(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the samples at positions ``[start, end)`` as numbers in packed order, ``int64 [end-start]``.

        This is the canonical sequence, for tests and tools; a loader iterates over lanes.
        """
        if self.config.shuffle == "full":
            return self.feistel()(np.arange(start, end))
        ids = np.empty(end - start, np.int64)
        for lane in range(self.lanes):
            first = start + (lane - start) % self.lanes
            if first < end:
                places = len(range(first, end, self.lanes))
                ids[first - start :: self.lanes] = self.lane(lane).sample_ids(first // self.lanes, places)
        return ids


def keyed_permutation(order: Order, purpose: Purpose) -> FeistelPermutation:
    """Return the computed permutation of all samples for a purpose in an epoch."""
    keys = words(FeistelPermutation.ROUNDS, seed=order.config.seed, purpose=purpose, epoch=order.epoch)
    return FeistelPermutation(order.samples, keys)


def _permutation(order: Order, count: int, purpose: Purpose, index: int = 0, part: int = 0) -> NDArray[np.int64]:
    """Return the permutation of ``range(count)`` for a purpose in an epoch."""
    return permutation(count, seed=order.config.seed, purpose=purpose, epoch=order.epoch, index=index, part=part)


class Lane:
    """One lane of an epoch; created by :meth:`Order.lane`.

    A piece is a super-sample or unit, or the part of one that is in the lane: the first piece may begin behind the
    first row, and the last may end before the last row.

    Attributes:
        super_samples: super-sample of each piece, or with ``unit_bytes`` its unit, ``uint32 [pieces]``.
        block_ends: place in the lane behind the last sample of each block, ``int64 [blocks]``.
    """

    def __init__(
        self, order: Order, lane: int, super_samples: NDArray[np.uint32], counts: NDArray[np.integer], first_row: int
    ) -> None:
        self._order, self._lane = order, lane
        self.super_samples, self._counts, self._first_row = super_samples, counts, first_row
        pieces, window = len(super_samples), order.config.window
        self._parts = min(window, max(1, pieces // 2)) if order.config.shuffle == "window" else 1
        self._group = window if order.config.shuffle == "block" else 1
        sizes = self._block_sizes()
        self.block_ends = np.cumsum(sizes, out=sizes)
        self._row_permutations: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._latest: tuple[int, Block] | None = None

    def _block_sizes(self) -> NDArray[np.int64]:
        if self._group > 1:
            return np.add.reduceat(self._counts, np.arange(0, len(self._counts), self._group), dtype=np.int64)
        sizes = np.zeros(len(self._counts) + self._parts - 1, np.int64)
        for start in range(0, len(self._counts), _PIECES_AT_ONCE):
            counts = self._counts[start : start + _PIECES_AT_ONCE].astype(np.int64)
            previous_cut = np.zeros_like(counts)
            for part in range(self._parts):
                cut = (part + 1) * counts // self._parts
                sizes[start + part : start + part + len(counts)] += cut - previous_cut
                previous_cut = cut
        return sizes

    def row_range(self, piece: int) -> range:
        """Return the rows of a piece's super-sample that belong to the lane."""
        start = 0 if piece else self._first_row
        return range(start, start + int(self._counts[piece]))

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.super_samples)

    def block_of(self, position: int) -> int:
        """Return the block that contains a place of the lane."""
        return int(np.searchsorted(self.block_ends, position, "right"))

    def first_places(self) -> NDArray[np.int64]:
        """Return the place of the lane from which each piece is needed, ``int64 [pieces]``: its first block's start."""
        begins = np.concatenate([[0], self.block_ends])
        blocks = np.arange(len(self.super_samples)) // self._group
        if self._parts > 1:
            blocks += -(-self._parts // self._counts.astype(np.int64)) - 1  # its first part with a sample
        places: NDArray[np.int64] = begins[blocks]
        return places

    def pieces_of(self, block: int) -> range:
        """Return the pieces that may have samples in a block."""
        count = len(self.super_samples)
        if self._group > 1:
            return range(block * self._group, min((block + 1) * self._group, count))
        return range(max(0, block - self._parts + 1), min(block + 1, count))

    def used_pieces(self, block: int) -> NDArray[np.int64]:
        """Return the pieces that have samples in a block, ascending; fewer than may have if the window is large."""
        pieces = self.pieces_of(block)
        counts = self._counts[pieces.start : pieces.stop].astype(np.int64)
        parts = block - np.arange(pieces.start, pieces.stop) if self._parts > 1 else np.zeros(1, np.int64)
        used: NDArray[np.int64] = np.flatnonzero((parts + 1) * counts // self._parts > parts * counts // self._parts)
        return used + pieces.start

    def block(self, block: int) -> Block:
        """Return the samples of a block, in order; the most recent block is cached."""
        if self._latest is None or self._latest[0] != block:
            self._latest = block, self._make_block(block)
        return self._latest[1]

    def row_indices(self, block: int, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples ``[start, end)`` of a block: indices into :meth:`used_pieces`, and rows."""
        content = self.block(block)
        return content.piece_indices[start:end], content.rows[start:end]

    def _make_block(self, block: int) -> Block:
        pieces = self.used_pieces(block)
        parts = [self._rows_of(piece, block) for piece in pieces.tolist()]
        owners = np.repeat(np.arange(len(pieces)), [len(part) for part in parts])
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if self._order.config.shuffle != "none":
            shuffled = _permutation(self._order, len(rows), Purpose.BLOCK, block, self._lane)
            owners, rows = owners[shuffled], rows[shuffled]
        return Block(pieces, owners, rows)

    def _rows_of(self, piece: int, block: int) -> NDArray[np.int64]:
        """Return the rows of a piece that belong to a block, before the permutation of the block."""
        rows = self.row_range(piece)
        if self._parts == 1:
            return np.arange(rows.start, rows.stop)
        part, count = block - piece, len(rows)
        permuted = self._row_permutation(piece)
        return rows.start + permuted[part * count // self._parts : (part + 1) * count // self._parts]

    def _row_permutation(self, piece: int) -> NDArray[np.int64]:
        """Return the permutation of a piece's rows; those of the pieces in the window are cached."""
        if piece in self._row_permutations:
            return self._row_permutations[piece]
        rows = self.row_range(piece)
        permutation = _permutation(self._order, len(rows), Purpose.ROWS, int(self.super_samples[piece]), rows.start)
        self._row_permutations[piece] = permutation
        if len(self._row_permutations) > self._parts:
            self._row_permutations.popitem(last=False)
        return permutation

    def sample_ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples at places ``[start, start + count)``, ``count >= 1``, as numbers in packed order."""
        parts: list[NDArray[np.int64]] = []
        block = self.block_of(start)
        begin = int(self.block_ends[block - 1]) if block else 0
        while begin < start + count:
            content = self.block(block)
            ids = self._order.sample_ids(self.super_samples[content.pieces[content.piece_indices]], content.rows)
            parts.append(ids[max(0, start - begin) : start + count - begin])
            begin, block = int(self.block_ends[block]), block + 1
        return np.concatenate(parts)
